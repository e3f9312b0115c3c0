"""A plan whose step misses the budget is made again, once, with what was seen; and no bit of a result changes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading

import pytest
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint

from glue_compiler import backend
from glue_compiler.compat import recompile
from glue_compiler.replan import replanner
from tests.passes.overlap_offload.models import Block, equal
from tests.replan.steps import Device, Followed, Plain, results

BUDGET = 400_000
ROWS = 256
# Some peaks that are made up here leave a second plan no room, which is told, and not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:glue. the memory_budget of:glue_compiler.errors.GlueWarning")


def planned_for(budget=BUDGET, **how):
    device = Device()
    run = Followed(device, memory_budget=budget)
    model = Plain()
    return device, run, model, torch.compile(model, **run.how, **how), torch.randn(ROWS, 16)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("over", [1.5, 1.02, 0.9])
def test_a_plan_whose_step_misses_its_budget_is_made_again(over):
    """By more than 3 percent: the peak is that of all that is on the device."""
    device, run, model, call, x = planned_for()
    expected = results(model, model, x)
    peaks = [0, int(over * BUDGET), 0, 0, 0, 0]
    found = [results(call, model, x, device, peak) for peak in peaks]
    assert all(equal(each, expected) for each in found)
    assert len(run.plans) == (2 if over > 1.03 else 1)
    assert len(run.told) == len(run.plans) - 1
    if over > 1.03:
        first, second = run.plans
        assert second["peak"] < first["peak"]
        assert second["recomputed"] > first["recomputed"]
        assert "was seen to take" in run.told[0]
        reasons = [skip.reason for p in run.session.graphs[1].passes for skip in p.skips]
        assert any(reason.startswith("planned again: a step was seen") for reason in reasons)


def test_an_optimisers_state_behind_the_first_step_counts():
    device, run, model, call, x = planned_for()
    for _ in range(4):
        results(call, model, x, device, device.allocated + run.plans[0]["peak"] - 20_000 if run.plans else 0)
        device.allocated = 150_000
    first, second = run.plans
    assert second["peak"] < first["peak"]
    assert second["peak"] <= BUDGET - 100_000


def test_it_is_made_again_once():
    device, run, model, call, x = planned_for()
    for step in range(8):
        results(call, model, x, device, (2 + step) * BUDGET)
    assert len(run.plans) == 2


def test_a_peak_of_an_earlier_time_is_not_the_steps():
    """Torch's statistics are the user's: without a reset, a peak that does not grow may be one of the compile."""
    device, run, model, call, x = planned_for()
    device.peak = 100 * BUDGET
    for _ in range(4):
        results(call, model, x, device, 0)
    assert len(run.plans) == 1


@pytest.mark.slow
def test_other_graphs_stay():
    device, run, model, call, x = planned_for()
    other = torch.randn(ROWS // 8, 16)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for step in range(4):
            results(call, model, x, device, (step == 1) * 2 * BUDGET)
            results(call, model, other)
    assert len(run.plans) == 3
    assert len(run.told) == 1


def test_lengths_that_vary():
    device, run, model, call, _ = planned_for(dynamic=True)
    for step, rows in enumerate((ROWS, ROWS - 40, ROWS + 24, ROWS - 8, ROWS)):
        x = torch.randn(rows, 16)
        expected = results(model, model, x)
        found = results(call, model, x, device, (step == 1) * 2 * BUDGET)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)
    first, second = run.plans
    assert second["saved_bytes"] < first["saved_bytes"]


def test_not_while_a_forward_waits_for_its_backward():
    device, run, model, call, x = planned_for()
    results(call, model, x, device, 0)
    results(call, model, x, device, 2 * BUDGET)
    waiting = call(x)  # it decides, and goes on with the old plan
    assert len(run.told) == 1
    assert len(run.plans) == 1
    waiting.sum().backward()
    device, run, model, call, x = planned_for()
    results(call, model, x, device, 0)
    waiting = call(x)
    device.peak = 2 * BUDGET
    others = [call(x), call(x)]
    assert not run.told
    sum(out.sum() for out in (waiting, *others)).backward()


def test_nor_in_a_backward():
    device, run, model, call, x = planned_for()
    results(call, model, x, device, 0)
    results(call, model, x, device, 2 * BUDGET)
    y = torch.ones(2, requires_grad=True)

    def inside(_):
        with torch.enable_grad():
            call(x)

    y.register_hook(inside)
    (y * 2).sum().backward()
    assert not run.told
    call(x)
    assert run.told


def test_what_a_checkpoint_calls_again_keeps_its_plan():
    """It must save what the first call saved, and the step that decides has made that already."""
    device, run, model, call, x = planned_for()
    x.requires_grad_()
    expected = results(model, model, x)
    for step in range(5):
        found = results(lambda x: checkpoint(call, x, use_reentrant=False), model, x, device, step * 2 * BUDGET)
        assert equal(found, expected)
    assert len(run.plans) == 1
    assert "under hooks on saved tensors" in run.told[0]


def test_ranks_keep_their_plans(monkeypatch):
    monkeypatch.setattr(recompile, "several_ranks", lambda: True)
    device, run, model, call, x = planned_for()
    for step in range(5):
        results(call, model, x, device, (step == 1) * 2 * BUDGET)
    assert len(run.plans) == 1
    assert "one of several ranks" in run.told[0]


@pytest.mark.parametrize("why", ["stance", "unsafe", "error", "accumulated", "gone"])
def test_where_a_recompile_would_harm_the_plan_stays(why, monkeypatch):
    device, run, model, call, x = planned_for()
    results(call, model, x, device, 0)
    results(call, model, x, device, 2 * BUDGET)
    if why == "gone":
        run.backend.frames.clear()
    with (
        torch.compiler.set_stance(
            "fail_on_recompile" if why == "stance" else "default", skip_guard_eval_unsafe=why == "unsafe"
        ),
        torch._dynamo.config.patch(
            error_on_recompile=why == "error", accumulated_recompile_limit=2 if why == "accumulated" else 256
        ),
    ):
        for _ in range(3):
            results(call, model, x, device, 0)
    assert len(run.plans) == 1
    assert len(run.told) == 1
    assert "it is not planned again" in run.told[0]


class Kind(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.block, self.number = Block(16), number

    def forward(self, x):
        return self.block(x) * self.number


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_dropped_does_not_count_for_the_recompile_limit(fullgraph):
    """As many graphs of one code as may be, and all are planned again: behind one too many, frames run eagerly."""
    kinds, device = 3, Device()
    run = Followed(device, memory_budget=100_000)
    layers = nn.ModuleList(Kind(number) for number in range(1, kinds + 1))
    layers.forward = lambda x: functools.reduce(lambda value, layer: layer(value), layers, x)
    x = torch.randn(ROWS, 16, requires_grad=True)
    expected = results(layers, layers, x)
    for layer in layers:
        layer.compile(fullgraph=fullgraph, **run.how)
    with torch._dynamo.config.patch(recompile_limit=kinds):
        for step in range(6):
            assert equal(results(layers, layers, x, device, step * BUDGET), expected)
        assert len(run.plans) == 2 * kinds
        assert isinstance(layers(x).grad_fn, BackwardCFunction)
        # Another graph of the code is one too many, as ever.
        if not fullgraph:
            layers[0].number = 17
            assert not isinstance(layers[0](x).grad_fn, BackwardCFunction)


@pytest.mark.parametrize("options", [{"verify": True}, {"fuel": 100}, {"passes": {"plan_memory": False}}])
def test_what_compares_runs_is_not_planned_again(options):
    device = Device()
    run = Followed(device, memory_budget=BUDGET, **options)
    model, x = Plain(2), torch.randn(ROWS, 16)
    call = torch.compile(model, **run.how)
    for step in range(4):
        results(call, model, x, device, (step == 1) * 2 * BUDGET)
    assert len(run.session.graphs) == 1
    assert not run.told


def test_memory_that_comes_behind_the_first_steps_counts():
    """Of accumulated gradients an optimiser makes its state later."""
    device, run, model, call, x = planned_for()
    expected = results(model, model, x)
    for _ in range(6):
        results(call, model, x, device, device.allocated + run.plans[0]["peak"] if run.plans else 0)
    assert not run.backend.replanner._followed
    device.allocated = 150_000
    for _ in range(10):
        assert equal(results(call, model, x, device, device.allocated + run.plans[0]["peak"]), expected)
    first, second = run.plans
    assert second["peak"] <= BUDGET - 100_000 < first["peak"]


def test_a_result_that_is_kept_without_a_backward_is_told(monkeypatch):
    monkeypatch.setattr(replanner, "MOST_CALLS", 6)
    device, run, model, call, x = planned_for()
    kept = call(x)
    for _ in range(8):
        results(call, model, x, device, 2 * BUDGET)
    assert run.told == [replanner.UNSEEN]
    assert len(run.plans) == 1
    del kept


def test_the_backward_of_a_call_whose_first_result_is_a_view():
    class Both(Plain):
        def forward(self, x):
            out = super().forward(x)
            return out.view(-1), out

    device = Device()
    run = Followed(device, memory_budget=BUDGET)
    model, x = Both(), torch.randn(ROWS, 16)
    call = torch.compile(model, **run.how)
    for step in range(4):
        results(lambda x: call(x)[1], model, x, device, (step == 1) * 2 * BUDGET)
    assert len(run.plans) == 2


def test_auto_is_asked_again(monkeypatch):
    """What is free then is less by what came since, which is not taken off twice."""
    budgets = iter([BUDGET, 250_000])
    asked = []

    def in_bytes(options, inputs):
        asked.append(options.memory_budget)
        return dataclasses.replace(options, memory_budget=next(budgets))

    monkeypatch.setattr(backend, "in_bytes", in_bytes)
    device, run, model, call, x = planned_for("auto")
    device.allocated = 1_000_000  # when it is compiled, and free is less by that
    results(call, model, x, device, 0)
    device.allocated = 1_100_000
    for _ in range(3):
        results(call, model, x, device, device.allocated + run.plans[0]["peak"])
    assert asked == ["auto", "auto"]
    assert run.plans[1]["peak"] <= 250_000
    (correction,) = run.backend.replanner._corrections.values()
    assert correction.taken < 50_000


def test_threads_call_at_once():
    device, run, model, call, x = planned_for()
    expected = results(model, model, x)
    call(x).sum().backward()
    wrong = []

    def work(own):
        compiled = torch.compile(own, **run.how)
        for _ in range(6):
            device.peak += BUDGET
            if not equal(results(compiled, own, x), expected):
                wrong.append(own)

    threads = [threading.Thread(target=work, args=(copy.deepcopy(model),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_a_budget_nothing_is_followed():
    device = Device()
    run = Followed(device)
    model, x = Plain(2), torch.randn(8, 16)
    call = torch.compile(model, **run.how)
    for _ in range(3):
        results(call, model, x, device, 10**9)
    assert not run.backend.replanner._devices
    assert len(run.session.graphs) == 1


def test_a_graph_of_no_step_is_followed_for_a_while(monkeypatch):
    monkeypatch.setattr(replanner, "MOST_CALLS", 3)
    _, run, _, call, x = planned_for()
    for _ in range(6):
        call(x)
    assert not run.backend.replanner._followed


def test_a_graph_that_is_seldom_called_is_followed_when_it_is():
    """It has no others be followed meanwhile."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        device, run, model, call, x = planned_for()
        seldom = torch.randn(ROWS - 32, 16)
        results(call, model, seldom)
        for _ in range(4 + replanner.MOST_IDLE):
            results(call, model, x)
        assert not run.backend.replanner._followed
        assert len(run.plans) == 2
        for step in range(4):
            results(call, model, seldom, device, step * 4 * BUDGET)
    assert len(run.plans) == 3
    assert run.plans[2]["saved_bytes"] < run.plans[0]["saved_bytes"]


def test_a_device_that_cannot_be_asked_ends_no_step(monkeypatch):
    device, run, model, call, x = planned_for()
    expected = results(model, model, x)
    results(call, model, x)

    def fail(_):
        raise RuntimeError("no such device")

    monkeypatch.setattr(device, "mark", fail)
    monkeypatch.setattr(run.backend.replanner, "_mark", fail)
    with pytest.warns(match="follows the memory of steps no longer"):
        assert equal(results(call, model, x), expected)
    assert equal(results(call, model, x), expected)
    assert not run.backend.replanner._followed


def test_where_the_backward_is_compiled_as_a_whole_nothing_is_followed():
    """It would be compiled again for each call's hook."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        _, run, _, call, x = planned_for()
        call(x)
    assert not run.backend.replanner._followed
    assert len(run.plans) == 1


def test_reset_forgets():
    device, run, model, call, x = planned_for()
    for step in range(4):
        results(call, model, x, device, (step == 1) * 2 * BUDGET)
    assert run.backend.replanner._corrections
    torch.compiler.reset()
    run.backend.reset()
    assert not run.backend.replanner._corrections
