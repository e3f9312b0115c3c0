"""Sizes that data decides, and a backward that the compiler cannot compile with them: the graph breaks as without glue.

Outputs and gradients are eager's in each call, whatever the sizes.
"""

import pytest
import torch

from glue_compiler.backend import GlueBackend
from glue_compiler.compat import inductor
from glue_compiler.errors import GlueCaptureError
from glue_compiler.report.session import Session
from tests.slow import one_in


def mean_of_each_row(x, lengths):
    return torch.stack([x[i, : int(lengths[i])].mean(0) for i in range(x.shape[0])])


def up_to_the_longest(x, lengths):
    return x[:, : int(lengths.max())] * 2


def both_ends(x, lengths):
    return torch.cat([x[:, : int(lengths[0])], x[:, int(lengths[1]) :]], 1).sin()


def gathered(x, lengths):
    return x[torch.arange(x.shape[1]) < lengths[:, None]].sin()


def stepped(call, x, lengths):
    x = x.clone().requires_grad_()
    out = call(x, lengths)
    (out**2).sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize(
    ("program", "compiler"),
    [
        *[(each, "aot_eager") for each in (mean_of_each_row, up_to_the_longest, both_ends, gathered)],
        *[
            pytest.param(each, "inductor", marks=pytest.mark.slow)
            for each in (mean_of_each_row, up_to_the_longest, both_ends, gathered)
        ],
    ],
)
def test_outputs_and_gradients_are_eagers_for_all_lengths(program, compiler):
    compiled = torch.compile(program, backend="glue", options={"compiler": compiler})
    for lengths in ([2, 4], [1, 3], [4, 4], [1, 1], [0, 0], [3, 2]):
        x = torch.randn(2, 4, 3, dtype=torch.float64)
        actual = stepped(compiled, x, torch.tensor(lengths))
        torch.testing.assert_close(actual, stepped(program, x, torch.tensor(lengths)), equal_nan=True)


@pytest.mark.parametrize("dynamic", one_in(2, [True, False]))
def test_a_size_that_backward_is_not_compiled_with_is_told_and_the_graph_breaks(dynamic, caplog):
    session = Session()
    compiled = torch.compile(up_to_the_longest, backend=GlueBackend(session=session), dynamic=dynamic)
    x, lengths = torch.randn(2, 4, 3, dtype=torch.float64), torch.tensor([2, 3])
    torch.testing.assert_close(stepped(compiled, x, lengths), stepped(up_to_the_longest, x, lengths))
    assert [event.retried for event in session.capture_events] == [True]
    assert "failed to eagerly compile backwards" not in caplog.text


@pytest.mark.slow
def test_a_size_that_backward_is_compiled_with_stays_in_the_graph():
    session = Session()
    compiled = torch.compile(gathered, backend=GlueBackend(session=session))
    x, lengths = torch.randn(2, 4, 3, dtype=torch.float64), torch.tensor([2, 3])
    torch.testing.assert_close(stepped(compiled, x, lengths), stepped(gathered, x, lengths))
    assert not session.capture_events


def test_without_gradients_the_size_stays_in_the_graph():
    session = Session()
    compiled = torch.compile(up_to_the_longest, backend=GlueBackend(session=session))
    with torch.no_grad():
        compiled(torch.randn(2, 4, 3), torch.tensor([2, 3]))
    assert not session.capture_events


def no_backward(monkeypatch):
    import torch._inductor.compile_fx as compile_fx

    inner = compile_fx.compile_fx_inner

    def fails(gm, inputs, **kwargs):
        if kwargs.get("is_backward", False):
            raise NotImplementedError("no backward here")
        return inner(gm, inputs, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fails)


def test_a_backward_that_fails_for_another_reason_is_left_to_torch(monkeypatch):
    """It may never run, and where it does it fails in the same way without glue's capture."""
    no_backward(monkeypatch)
    session = Session()
    compiled = torch.compile(lambda x: x.sin().sum(0), backend=GlueBackend(session=session), dynamic=True)
    out = compiled(torch.ones(3, 2, requires_grad=True))
    with pytest.raises(Exception, match="no backward here"):
        out.sum().backward()
    assert not session.capture_events


def test_a_backward_that_reads_its_size_itself_fails_late_and_names_the_option(monkeypatch):
    """AOTAutograd compiles such a one when it first runs."""
    no_backward(monkeypatch)
    monkeypatch.setattr(inductor, "_depends_on_data", lambda graph: True)
    out = torch.compile(lambda x: x.sin().sum(0), backend="glue", dynamic=False)(torch.ones(3, 2, requires_grad=True))
    with pytest.raises(GlueCaptureError, match=r"no backward here(.|\n)*options=\{'capture': False\}"):
        out.sum().backward()


def test_failures_are_left_to_torch_where_there_is_no_second_try():
    """With the user's own flags there is no other way to convert the frame, and the backward may never run."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(up_to_the_longest, backend="glue")
        x = torch.randn(2, 4, 3, requires_grad=True)
        out = compiled(x, torch.tensor([2, 3]))
    assert not inductor._raises_failures.is_on
    torch.testing.assert_close(out, up_to_the_longest(x, torch.tensor([2, 3])))


def variance_up_to(x, lengths):
    return x[:, : int(lengths.max())].var(1, unbiased=False)


def corrected_deviation_up_to(x, lengths):
    """Divided by zero for a size of 1."""
    return x[:, : int(lengths.max())].std(1)


def mean_up_to(x, lengths):
    return x[:, : int(lengths.max())].mean(1)


def variance_of_features(x, lengths):
    return x[:, : int(lengths.max())].var(2)


@pytest.mark.parametrize(
    ("program", "is_captured"),
    [
        (variance_up_to, False),
        (corrected_deviation_up_to, False),
        (mean_up_to, True),
        (variance_of_features, True),
    ],
)
def test_a_gradient_divided_by_a_captured_size_is_eagers_where_that_is_zero(program, is_captured):
    """torch divides a Python number by the size: its graph raises where eager gives NaN."""
    session = Session()
    options = {"compiler": "aot_eager"}
    compiled = torch.compile(program, backend=GlueBackend(session=session), options=options)
    for lengths in ([2, 3], [0, 0], [1, 0]):
        x = torch.randn(2, 4, 3, dtype=torch.float64)
        actual = stepped(compiled, x, torch.tensor(lengths))
        torch.testing.assert_close(actual, stepped(program, x, torch.tensor(lengths)), equal_nan=True)
    assert (not session.capture_events) == is_captured


def test_without_a_gradient_a_variance_over_a_captured_size_stays_in_the_graph():
    session = Session()
    compiled = torch.compile(variance_up_to, backend=GlueBackend(session=session), options={"compiler": "aot_eager"})
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    for lengths in ([2, 3], [0, 0]):
        actual = compiled(x, torch.tensor(lengths))
        torch.testing.assert_close(actual, variance_up_to(x, torch.tensor(lengths)), equal_nan=True)
    assert not session.capture_events
