"""Sizes that depend on data, where tracing assumes what eager does not: each call runs as it does in eager."""

import pytest
import torch

from tests import versions
from tests.captured import compile_with_glue
from tests.slow import one_in


def fills(n, x):
    return torch.zeros(n.max().item(), dtype=x.dtype) + x


def fills_and_asks(n, x):
    """What is assumed is also put into the program."""
    filled = torch.ones(n.max().item(), dtype=x.dtype)
    return (filled + x) * filled.shape[0]


def multiplies_rows(n, x):
    return torch.nonzero(n).to(x.dtype)[:, 0] * x


def chooses(n, x):
    return torch.where(torch.arange(n.sum().item()) > 0, x, -x)


def adds_two(n, x):
    return torch.ones(n.max().item(), dtype=x.dtype) + torch.ones(n.min().item(), dtype=x.dtype)


def expands(n, x):
    return x[: n.max().item()].clone().expand(3)


def squeezes(n, x):
    return torch.ones(n.max().item(), 3).squeeze(0).sum(0) + x.sum()


def of_floats(n, x):
    """No guard reads floats."""
    return torch.zeros((x.sum() * 0 + x.shape[0] - 2).int().item(), dtype=x.dtype) + x * n.sum()


def lengths_of_documents(n, x):
    """Where no document starts, the difference is empty: eager takes the size of 1 for none."""
    starts = torch.nonzero(n == 1).flatten()
    return torch.cat([starts[1:], starts.new_full((1,), n.shape[0])]) - starts + x[0]


def lengths_with_where(n, x):
    starts = torch.where(n == 1)[0]
    return torch.cat([starts[1:], starts.new_full((1,), n.shape[0])]) - starts + x[0]


def in_a_helper(n, x):
    return fills(n + 0, x.sin()).cos()


PROGRAMS = [
    fills,
    fills_and_asks,
    multiplies_rows,
    chooses,
    adds_two,
    expands,
    squeezes,
    of_floats,
    in_a_helper,
    lengths_of_documents,
    lengths_with_where,
]


@pytest.mark.parametrize("program", [lengths_of_documents, lengths_with_where], ids=lambda program: program.__name__)
@pytest.mark.parametrize("numbers", [[3, 3], [3, 1]], ids=str)
def test_sizes_that_all_depend_on_data_are_checked_in_the_first_call_alone(program, numbers, monkeypatch):
    """A guard would read the data in each call."""
    from glue_compiler.compat import branch_guards

    monkeypatch.setattr(branch_guards, "install_guard", lambda *_: pytest.fail("a guard"))
    run = compile_with_glue(program, fullgraph=False)
    n, x = torch.tensor(numbers), torch.arange(1.0, 4.0)
    assert torch.equal(run.call(n, x), program(n, x))
    assert (len(run.graphs) == 1 and not run.session.capture_events) == (1 in numbers)


def outcome(call, *inputs):
    try:
        return call(*inputs)
    except Exception as error:
        return RuntimeError if isinstance(error, RuntimeError) else type(error)  # torch derives its own kinds


@pytest.mark.parametrize("first", [[3, 3], [1, 1]], ids=str)
@pytest.mark.parametrize("program", one_in(3, PROGRAMS), ids=lambda program: program.__name__)
def test_calls_run_as_in_eager(program, first):
    run = compile_with_glue(program, fullgraph=False)
    for numbers in (first, [3, 1], [1, 0], [2, 1], [3, 1]):
        inputs = torch.tensor(numbers), torch.arange(1.0, 4.0, dtype=torch.float64)
        want, got = outcome(program, *inputs), outcome(run.call, *inputs)
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got, want)
        else:
            assert got is want


@pytest.mark.parametrize(
    ("program", "numbers", "keeps"),
    [
        (fills, [3, 1], True),
        (fills, [1, 0], False),
        (lengths_of_documents, [3, 1], True),
        (lengths_with_where, [1, 1], True),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_calls_that_keep_to_the_assumption_are_one_graph(program, numbers, keeps):
    run = compile_with_glue(program, fullgraph=False)
    for _ in range(2):
        run.call(torch.tensor(numbers), torch.ones(3))
    assert (len(run.graphs) == 1) == keeps
    assert [event.retried for event in run.session.capture_events] == ([] if keeps else [True])


def adds_rows(n, x):
    return x[n == 3] + x[n != 3]


def writes_rows_to_others(n, x):
    out = torch.zeros_like(x)
    out[n != 3] = x.gather(0, torch.nonzero(n == 3)[:, 0])
    return out


def writes_rows_at_a_place(n, x):
    place = torch.nonzero(n != 3)[:, 0]
    return torch.zeros_like(x).view(1, -1).index_put((torch.zeros_like(place), place), x[n == 3], accumulate=True)


def assigns_rows_to_all(n, x):
    out = torch.zeros_like(x)
    out[:] = x[n == 3]
    return out


def adds_rows_of_one_mask(n, x):
    mask = n == 3
    return x[mask] + x.sin()[mask]


def writes_rows_of_one_mask(n, x):
    mask = n == 3
    out = torch.zeros_like(x)
    out[mask] = x[mask] * 2
    return out


def writes_rows_of_one_nonzero(n, x):
    (place,) = torch.where(n == 3)
    out = torch.zeros_like(x).repeat(2, 1)
    out[0, place] = x[place] * 2
    return out


def results(call, numbers):
    x = torch.arange(1.0, 1.0 + len(numbers), dtype=torch.float64, requires_grad=True)
    out = call(torch.tensor(numbers), x)
    out.square().sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize(
    ("program", "is_one_graph"),
    [
        (adds_rows, False),
        (writes_rows_to_others, False),
        (writes_rows_at_a_place, False),
        (adds_rows_of_one_mask, True),
        (writes_rows_of_one_mask, True),
        (writes_rows_of_one_nonzero, True),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_two_sizes_that_depend_on_data_may_be_another_and_1(program, is_one_graph):
    """Also what autograd makes of them: the gradient of one row that is written to several is a sum."""
    run = compile_with_glue(program, fullgraph=False, dynamic=True)
    for numbers in ([3, 1, 3, 1], [3, 1, 1, 1], [1, 3]):
        torch.testing.assert_close(results(run.call, numbers), results(program, numbers))
    assert ([event.retried for event in run.session.capture_events] == []) == is_one_graph


@pytest.mark.parametrize("first", [[3, 1, 1], [3, 3, 3]], ids=["one row", "all rows"])
def test_one_row_may_be_assigned_to_all(first):
    run = compile_with_glue(assigns_rows_to_all, fullgraph=False)
    for numbers in (first, [3, 3, 3], [1, 3, 1]):
        torch.testing.assert_close(results(run.call, numbers), results(assigns_rows_to_all, numbers))


def splits(n, x):
    return torch.cat([part.sum(0, keepdim=True) for part in x.split(n.tolist())])


def views(n, x):
    return x.view(n[0].item(), -1).sum()


def multiplies(n, x):
    return torch.ones(2, n.max().item(), dtype=x.dtype) @ x


def checks(n, x):
    length = n.max().item()
    torch._check(length <= 3)
    return torch.zeros(length) + 1


def differences(n, x):
    starts = torch.nonzero(n).flatten()
    return (starts[1:] - starts[:-1]).sum() + views(n, x)


@pytest.mark.parametrize(
    ("program", "numbers"),
    [(splits, [2, 1]), (differences, [3, 1]), (views, [3, 1]), (multiplies, [3, 1]), (checks, [2, 1])],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_eager_asks_for_too_needs_no_guard(program, numbers, monkeypatch):
    from glue_compiler.compat import branch_guards

    monkeypatch.setattr(branch_guards, "install_guard", lambda *_: pytest.fail("a guard"))
    run = compile_with_glue(program, fullgraph=False)
    x = torch.arange(1.0, 4.0, dtype=torch.float64)
    torch.testing.assert_close(run.call(torch.tensor(numbers), x), program(torch.tensor(numbers), x))
    assert len(run.graphs) == 1
    assert run.session.capture_events == []
    with pytest.raises(RuntimeError):
        run.call(torch.tensor([5, 5]), x)


def test_a_ragged_size_beside_them_is_left_aside():
    def fn(n, x, nested):
        return differences(n, x), nested.sin()

    run = compile_with_glue(fn, fullgraph=False, dynamic=True)
    nested = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(1, 8)], layout=torch.jagged)
    n, x = torch.tensor([3, 1]), torch.arange(1.0, 4.0, dtype=torch.float64)
    torch.testing.assert_close(run.call(n, x, nested)[0], differences(n, x))
    assert len(run.graphs) == 1
    assert run.session.capture_events == []


@versions.SWITCHED_INFERENCE_MODE.mark
def test_modes_that_the_code_switches_are_not_switched_to_see():
    def fn(n, x):
        starts = torch.nonzero(n).flatten()
        with torch.inference_mode():
            starts = starts.view_as(starts)
        return x * 2

    run, n, x = compile_with_glue(fn, fullgraph=False), torch.tensor([1, 0]), torch.ones(3)
    assert torch.equal(run.call(n, x), fn(n, x))
    assert not torch.is_inference_mode_enabled()
    assert torch.nonzero(n).shape == (1, 1)  # the dispatcher is as it was
