"""Capture: the flags are on for glue's compiles, for nobody else's, and never a reason to fail."""

import traceback

import pytest
import torch

from glue_compiler.backend import GlueBackend
from glue_compiler.capture import FLAGS
from glue_compiler.errors import GlueSizeError, first_line
from glue_compiler.report.session import Session
from tests.captured import compile_with_glue, count

OPTIONS = {"compiler": "aot_eager"}


def uses_item(x):
    return x * x.sum().item() + torch.nonzero(x).shape[0]


class UsesItem(torch.nn.Module):
    def forward(self, x):
        return uses_item(x)


def flags_now():
    return [getattr(torch._dynamo.config, name) for name in FLAGS]


def graph_count():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def no_counts():
    torch._dynamo.utils.counters.clear()


def test_torch_compile_captures_one_graph():
    compiled = torch.compile(uses_item, backend="glue", options=OPTIONS)
    assert torch.equal(compiled(torch.ones(3)), uses_item(torch.ones(3)))
    assert graph_count() == 1


def test_module_compile_captures_one_graph():
    module = UsesItem()
    module.compile(backend="glue", options=OPTIONS)
    assert torch.equal(module(torch.ones(3)), uses_item(torch.ones(3)))
    assert graph_count() == 1


def test_a_layer_compiled_by_itself_captures_one_graph():
    model = torch.nn.Sequential(UsesItem(), torch.nn.Identity())
    model[0].compile(backend="glue", options=OPTIONS)
    model(torch.ones(3))
    assert graph_count() == 1


def test_another_backend_still_breaks_the_graph():
    torch.compile(uses_item, backend="glue", options=OPTIONS)(torch.ones(3))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(uses_item, backend="aot_eager")(torch.ones(3))
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) > 0


def test_the_flags_are_off_while_the_compiled_model_runs_and_afterwards():
    seen = []

    @torch._dynamo.disable
    def look(x):
        seen.append(flags_now())
        return x

    def fn(x):
        return look(x + 1) * 2

    compiled = torch.compile(fn, backend="glue", options=OPTIONS)
    compiled(torch.ones(3))
    compiled(torch.ones(3))
    assert seen == [[False, False]] * 2
    assert flags_now() == [False, False]


def test_another_backend_called_from_inside_breaks_the_graph_too():
    inner = torch._dynamo.disable(torch.compile(uses_item, backend="aot_eager"), recursive=False)

    def fn(x):
        return inner(x + 1) * 2

    compiled = torch.compile(fn, backend="glue", options=OPTIONS)
    assert torch.equal(compiled(torch.ones(3)), uses_item(torch.ones(3) + 1) * 2)
    assert any("item" in reason for reason in torch._dynamo.utils.counters["graph_break"])


def test_the_flags_are_restored_after_an_error():
    def fails(x):
        raise_here = x.sum().item()
        raise ValueError(f"{raise_here}")

    with pytest.raises(ValueError, match="3"):
        torch.compile(fails, backend="glue", options=OPTIONS)(torch.ones(3))
    assert flags_now() == [False, False]


def test_a_compiler_that_cannot_take_the_graph_gets_one_without_data_dependent_values():
    session = Session()
    seen = []

    def refuses_unbacked(gm, inputs, options, uuid):
        seen.append(count(gm, "item"))
        if seen[-1]:
            raise NotImplementedError("no unbacked symbols here")
        return gm.forward

    compiled = torch.compile(uses_item, backend=GlueBackend(hand_off=refuses_unbacked, session=session))
    assert torch.equal(compiled(torch.ones(3)), uses_item(torch.ones(3)))
    assert seen[0] == 1
    assert not any(seen[1:])
    assert [event.retried for event in session.capture_events][:1] == [True]


def test_an_error_that_has_nothing_to_do_with_the_flags_still_comes():
    def fn(x):
        return x @ torch.ones(7)

    with pytest.raises(Exception, match="7"):
        torch.compile(fn, backend="glue", options=OPTIONS)(torch.ones(3))


def test_a_users_own_setting_is_kept():
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        run = compile_with_glue(uses_item)
        run.call(torch.ones(3))
        assert flags_now() == [True, True]
    assert len(run.graphs) == 1


def test_reset_and_another_thread():
    import threading

    compiled = torch.compile(uses_item, backend="glue", options=OPTIONS)
    results = []
    thread = threading.Thread(target=lambda: results.append(compiled(torch.ones(3))))
    thread.start()
    thread.join()
    assert torch.equal(results[0], uses_item(torch.ones(3)))
    assert graph_count() == 1


class SumsToItem(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        return uses_item(self.linear(x))


def test_distributed_data_parallel_captures_too(tmp_path):
    """DDP puts an optimizer of its own between Dynamo and the backend."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = torch.nn.parallel.DistributedDataParallel(SumsToItem())
        session = Session()
        compiled = torch.compile(module, backend=GlueBackend(session=session), options=OPTIONS)
        x = torch.ones(2, 3)
        expected = module.module(x)
        actual = compiled(x)
        torch.testing.assert_close(actual, expected)
        actual.sum().backward()
        assert module.module.linear.weight.grad is not None
        assert not any(graph.graph_break for graph in session.graphs)
    finally:
        torch.distributed.destroy_process_group()


def branches_on_flags(x, flags):
    return uses_item(x.tanh() if flags.any() else x * 2)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build with CUDA asks the driver, for any backend")
def test_compiling_for_the_cpu_initializes_no_other_device(monkeypatch):
    """A checkpoint refuses to run where its forward does, and it may hold the first compile of a process."""
    from torch.utils.checkpoint import checkpoint

    asked = []
    # What Dynamo itself asks before and after each compile, for any backend.
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: asked.append(traceback.format_stack()))

    def gradient(call):
        x, flags = torch.ones(3, dtype=torch.float64, requires_grad=True), torch.tensor([True])
        checkpoint(call, x, flags, use_reentrant=False).sum().backward()
        return x.grad

    compiled = torch.compile(branches_on_flags, backend="glue", options=OPTIONS)
    torch.testing.assert_close(gradient(compiled), gradient(branches_on_flags))
    assert asked == []


def branches_and_loops(x, flags):
    for _ in range(2):
        x = uses_item(x.tanh() if flags.any() else x * 2)
    return x[x > 0].sum() * 2


def breaks_of(backend, **kwargs):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    args = torch.ones(3), torch.tensor([True])
    compiled = torch.compile(branches_and_loops, backend=backend, **kwargs)
    torch.testing.assert_close(compiled(*args), branches_and_loops(*args))
    return dict(torch._dynamo.utils.counters["graph_break"]), graph_count()


def test_without_capture_graphs_break_where_dynamo_breaks_them():
    expected = breaks_of("aot_eager")
    assert breaks_of("glue", options={**OPTIONS, "capture": False}) == expected
    assert breaks_of("glue", options=OPTIONS) == ({}, 1) != expected


def test_without_capture_nothing_observes_dynamo(monkeypatch):
    seen = []
    step = torch._dynamo.symbolic_convert.InstructionTranslatorBase.step

    def look(gm, inputs, options, uuid):
        seen.append(torch._dynamo.symbolic_convert.InstructionTranslatorBase.step)
        return gm.forward

    for capture in (False, True):
        torch._dynamo.reset()
        torch.compile(torch.sin, backend=GlueBackend(hand_off=look), options={"capture": capture})(torch.ones(3))
    assert seen[0] is step
    assert seen[1] is not step


def test_errors_of_the_capture_name_the_option_on_a_line_of_its_own():
    error = GlueSizeError("two sizes")
    assert str(error).startswith("two sizes\n")
    assert "options={'capture': False}" in str(error)
    assert first_line(error) == "GlueSizeError: two sizes"
