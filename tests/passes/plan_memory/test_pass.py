"""plan_memory in a compile: what is kept, computed again and moved changes no bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glue_compiler.errors import GlueWarning
from glue_compiler.fx import joint_graphs
from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes import plan_memory
from glue_compiler.passes.plan_memory import moves
from glue_compiler.passes.plan_memory.segments import segmentations
from glue_compiler.pipeline import registry
from glue_compiler.pipeline.results import Numerics, PassReport, Stage
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Block, Blocks, equal, step
from tests.slow import one_in

ON = {"passes": {"plan_memory": True}}


class Plain(nn.Module):
    """Blocks that are not checkpointed."""

    def __init__(self, count=5, width=16, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        for block in self.blocks:
            x = self.dropout(block(x))
        return x


class Selective(Plain):
    """Each block is checkpointed under a selective policy."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, self.policy)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


def planned(model, x, **options):
    """The report of plan_memory for a step, whose results are bitwise those without it."""
    torch.manual_seed(0)
    expected = step(compile_with_glue(model).call, model, x)
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = compile_with_glue(model, **ON, **options)
    assert equal(expected, step(run.call, model, x))
    (found,) = [p for p in run.report.passes if p.name == "plan_memory"]
    return found, run


def test_a_large_budget_recomputes_no_kernel_and_a_small_one_does():
    model, x = Plain(), torch.randn(256, 16)
    large, _ = planned(model, x, memory_budget=2**40)
    assert large.counts["recomputed"] == 0
    torch._dynamo.reset()
    with pytest.warns(match="cannot be kept"):
        small, _ = planned(model, x, memory_budget=1)
    assert small.counts["recomputed"] >= 4
    assert small.counts["saved_bytes"] < large.counts["saved_bytes"]
    assert small.counts["peak"] < large.counts["peak"]


def test_without_a_budget_the_partitioner_is_left_alone():
    model, x = Plain(2), torch.randn(8, 16)
    run = compile_with_glue(model, **ON)
    step(run.call, model, x)
    assert not [p for p in run.report.passes if p.name == "plan_memory"]


def test_checkpoints_are_hints():
    """With memory to spare, what a plain checkpoint would compute again is kept."""
    model, x = Blocks(4), torch.randn(64, 8)
    found, _ = planned(model, x, memory_budget=2**40)
    assert found.counts["recomputed"] == 0


def test_random_numbers_are_kept_and_not_drawn_again():
    with pytest.warns(match="cannot be kept"):
        planned(Plain(dropout=0.5), torch.randn(64, 16), memory_budget=1)


def test_sizes_that_vary():
    model = Plain(4)
    run = compile_with_glue(model, dynamic=True, memory_budget=1, **ON)
    for rows in (64, 96):
        x = torch.randn(rows, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GlueWarning)  # of the budget, in the first call
            found = step(run.call, model, x)
        for got, want in zip(found, step(model, model, x), strict=True):
            torch.testing.assert_close(got, want)


def save_products(context, operator, *args, **kwargs):
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.MUST_RECOMPUTE


def test_what_a_policy_insists_on_stays():
    with pytest.warns(match="cannot be kept"):
        found, _ = planned(Selective(save_products), torch.randn(64, 16), memory_budget=1)
    assert found.counts["recomputed"] == 0


def offload_products(context, operator, *args, **kwargs):
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_CPU_OFFLOAD if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def test_what_a_policy_moves_to_the_host_moves_under_a_plan():
    _, run = planned(Selective(offload_products), torch.randn(64, 16), memory_budget=2**40)
    (offload,) = [p for p in run.report.passes if p.name == "overlap_offload"]
    assert offload.counts["moved"] >= 5


@pytest.fixture
def moves_anything(monkeypatch):
    monkeypatch.setattr(moves, "LEAST", 0.0)
    monkeypatch.setattr(plan_memory, "rates_of", lambda device: Rates(flops=1e9, memory=1e8, link=1e12))


class Gated(Plain):
    """The backward of every layer reads the gate."""

    def forward(self, x):
        gate = torch.sigmoid(x @ x.t() @ x)
        for block in self.blocks:
            x = block(x) * gate
        return x


@pytest.mark.slow
@pytest.mark.parametrize("share", one_in(3, [0.75, 0.9, 0.6]))
def test_what_the_backward_of_every_layer_reads_is_not_planned_to_move(share, moves_anything):
    model, x = Gated(8), torch.randn(256, 16)
    large, _ = planned(model, x, memory_budget=2**40)
    torch._dynamo.reset()
    found, run = planned(model, x, memory_budget=int(large.counts["peak"] * share))
    (offload,) = [p for p in run.report.passes if p.name == "overlap_offload"]
    assert offload.counts["bytes"] == found.counts["moved_bytes"] > 0
    assert offload.counts["predicted_peak"] <= found.counts["peak"]
    assert not found.skips


@pytest.mark.slow
def test_nothing_moves_behind_a_plan_that_moves_nothing(monkeypatch):
    """Nor is a budget that it keeps said to be missed, by what other ways to keep it would take."""
    monkeypatch.setattr(plan_memory.PlanMemory, "cache_options", lambda self, options: None)
    own = plan_memory.plan_memory
    monkeypatch.setattr(
        plan_memory, "plan_memory", lambda step, rates, room, may_move, **how: own(step, rates, room, (), **how)
    )
    model, x = Blocks(6, 16), torch.randn(256, 16)
    large, _ = planned(model, x, memory_budget=2**40)
    torch._dynamo.reset()
    found, run = planned(model, x, memory_budget=int(large.counts["peak"] * 0.7))
    (offload,) = [p for p in run.report.passes if p.name == "overlap_offload"]
    assert found.counts["recomputed"] > 0
    assert found.counts["moved_bytes"] == 0
    assert not offload.changed
    assert offload.counts["predicted_peak"] <= offload.counts["memory_budget"]


@pytest.mark.parametrize("share", one_in(2, [0.8, 0.55]))
@pytest.mark.parametrize("seconds_a_byte", one_in(2, [1e-12, 3e-9]))
def test_what_compute_hides_is_moved(share, seconds_a_byte, monkeypatch):
    """All of it, and the finished graphs take what was predicted."""
    monkeypatch.setattr(moves, "LEAST", 0.0)
    rates = Rates(flops=1e9, memory=1e8, link=1 / seconds_a_byte)
    monkeypatch.setattr(plan_memory, "rates_of", lambda device: rates)
    model, x = Plain(8), torch.randn(256, 16)
    large, _ = planned(model, x, memory_budget=2**40)
    torch._dynamo.reset()
    found, run = planned(model, x, memory_budget=int(large.counts["peak"] * share))
    (offload,) = [p for p in run.report.passes if p.name == "overlap_offload"]
    assert found.counts["moved_bytes"] > 0
    assert offload.counts["bytes"] == found.counts["moved_bytes"]
    assert offload.counts["predicted_peak"] <= offload.counts["memory_budget"]


def test_an_operator_that_is_not_known_is_not_computed_again():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    known = graph.call_function(torch.ops.aten.mm.default, (x, x))
    drawn = graph.call_function(torch.ops.aten.rand_like.default, (x,))
    written = graph.call_function(torch.ops.aten.add_.Tensor, (x, x))
    collective = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))
    assert [joint_graphs.may_recompute(node) for node in (known, drawn, written, collective)] == [True, *[False] * 3]
    drawn.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE  # the user's checkpoint replays its numbers
    assert joint_graphs.may_recompute(drawn)


@pytest.mark.parametrize("writes", ["nothing", "a buffer", "a parameter's data", "a detached parameter"])
def test_what_reads_an_input_that_the_step_writes_is_not_computed_again(writes, steps_read):
    """Backward would read what was written."""

    class Model(Plain):
        def __init__(self):
            super().__init__(2)
            self.register_buffer("scale", torch.ones(16))
            self.shift = torch.nn.Parameter(torch.ones(16))

        def forward(self, x):
            if writes == "a parameter's data":
                self.shift.data.clamp_(max=0.5)
            if writes == "a detached parameter":
                self.shift.detach().clamp_(max=0.5)
            x = super().forward(x * torch.sin(self.scale) + self.shift)
            if writes == "a buffer":
                with torch.no_grad():
                    self.scale.mul_(0.5)
            return x

    model = Model()
    run = compile_with_glue(model, memory_budget=2**40, **ON)
    step(run.call, model, torch.randn(8, 16))
    ((found, nodes),) = steps_read
    (sine,) = (place for place, node in enumerate(nodes) if node.target is torch.ops.aten.sin.default)
    assert found.values[sine].may_recompute is not (writes == "a buffer")
    clones = [place for place, node in enumerate(nodes) if node.target is torch.ops.aten.clone.default]
    of_parameter = [found.values[place] for place in clones if found.values[found.values[place].inputs[0]].is_input]
    assert len(of_parameter) == ("parameter" in writes)
    assert not any(value.may_recompute for value in of_parameter)
    others = [place for place, node in enumerate(nodes) if node.target is torch.ops.aten.gelu.default]
    assert all(found.values[place].may_recompute for place in others)


@torch.library.custom_op("glue_test::with_halves", mutates_args=())
def with_halves(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return x + 1, [x * 2, x * 3]


@with_halves.register_fake
def _(x):
    return x + 1, [torch.empty_like(x), torch.empty_like(x)]


with_halves.register_autograd(
    lambda ctx, one, more: ctx.saved_halves[0] * one,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "saved_halves", output[1]),
)


def test_tensors_in_a_list_among_results_count_one_by_one(steps_read):
    """As the gradients do that a loss in chunks returns in its forward."""
    run = compile_with_glue(lambda x: with_halves(x)[0], memory_budget=2**40, **ON)
    x = torch.randn(8, 16, requires_grad=True)
    run.call(x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    ((found, nodes),) = steps_read
    tensors = [place for place, node in enumerate(nodes) if isinstance(node.meta["val"], torch.Tensor)]
    listed = [place for place in tensors if nodes[place].name.startswith("getitem")]
    elements = [found.values[place] for place in listed if place in found.needed]
    assert [(value.nbytes, value.may_save) for value in elements] == [(x.nbytes, True)]
    assert all(found.is_element(place) for place in listed)
    (plan,) = (p.counts for graph in run.session.graphs for p in graph.passes if p.name == "plan_memory")
    assert plan["saved_bytes"] == x.nbytes


@torch.library.custom_op("glue_test::starts", mutates_args=())
def starts(ids: torch.Tensor) -> torch.Tensor:
    return (ids == 0).nonzero().flatten()


@starts.register_fake
def _(ids):
    return ids.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("glue_test::within", mutates_args=())
def within(x: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2 + starts.sum() * 0, x.sum(-1)


within.register_fake(lambda x, starts: (torch.empty_like(x), x.new_empty(x.shape[:-1])))
within.register_autograd(lambda ctx, grad, _: (2 * grad, None), setup_context=lambda ctx, inputs, output: None)


def test_what_reads_a_tensor_of_unknown_size_stays_in_its_segment(steps_read):
    """Offsets of documents, which every layer's attention reads, have no bytes that are known. Nor has what an operator
    returns as a tuple, whose elements go where it goes; what reads the offsets does not go to theirs."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x, offsets):
            return x + self.outer(within(torch.tanh(self.inner(x)), offsets)[0])

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x, ids):
            offsets = starts(ids)
            for layer in self.layers:
                x = layer(x, offsets)
            return x

    model = Layers()
    run = compile_with_glue(model, memory_budget=2**40, **ON)
    run.call(torch.randn(8, 16), torch.arange(8) % 3).sum().backward()
    ((found, nodes),) = steps_read
    places = [place for place, node in enumerate(nodes) if node.target is torch.ops.glue_test.within.default]
    taken = [[nodes.index(user) for user in nodes[place].users] for place in places]
    assert len(places) == 6
    assert not any(map(found.is_element, places))
    assert all(map(found.is_element, itertools.chain(*taken)))
    segments = next(segmentations(found))
    assert [segments[element] for element, *_ in taken] == [segments[place] for place in places]
    assert len({segments[place] for place in places}) == 6


class Chosen(nn.Module):
    """Rows that the data chooses: as many as ``repeats`` says, or those that ``keep`` marks."""

    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, chosen):
        x = x + self.down(torch.tanh(self.up(x)))
        y = x[chosen] if chosen.dtype is torch.bool else x.repeat_interleave(chosen, 0)
        return (torch.tanh(y) * y).sum()


@pytest.mark.parametrize("chosen", [lambda rows: torch.arange(rows) % 3 > 0, lambda rows: torch.arange(rows) % 3])
def test_sizes_that_the_data_decides_have_no_bound_or_a_small_one(chosen):
    """Not the largest integer, though that is the range of a size that is no larger than a dynamic one."""
    model = Chosen()
    run = compile_with_glue(model, **ON, memory_budget=2**30)
    for rows in (64, 70, 50):
        run.call(torch.randn(rows, 16), chosen(rows)).backward()
    reports = [p for graph in run.session.graphs for p in graph.passes if p.name == "plan_memory"]
    assert len(reports) == 2
    assert all(0 < report.counts["peak"] < 2**24 for report in reports)
    unbounded = [any("known only when the graph runs" in skip.reason for skip in r.skips) for r in reports]
    assert unbounded == [chosen(1).dtype is not torch.bool, True]


@pytest.mark.parametrize("passes", [{}, {"plan_memory": False}])
@pytest.mark.parametrize("budget", [2**40, None])
def test_a_budget_alone_asks_for_a_plan(budget, passes):
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)), torch.randn(4, 8)
    run = compile_with_glue(model, memory_budget=budget, passes=passes)
    run.call(x).sum().backward()
    made = [report.name for report in run.report.passes if report.name == "plan_memory"]
    assert bool(made) == (budget is not None and not passes)


@pytest.mark.parametrize("seconds", [0.0, 4.0])
def test_where_planning_has_no_time_left_the_report_says_so(seconds, monkeypatch):
    (own,) = (each for each in registry.all_passes() if each.name == "plan_memory")
    ticks = itertools.count()
    monkeypatch.setattr(own, "clock", lambda: seconds * next(ticks))
    found, run = planned(Plain(3), torch.randn(64, 16), memory_budget=2**40)
    assert (found.counts["plans"] == 3) == bool(seconds)
    told = [reason for reason in run.skip_reasons if "planning ended when its 10 s were over" in reason]
    assert len(told) == bool(seconds)


def attends(x, weight, bias):
    for _ in range(3):
        query = x @ weight
        x = x + F.relu(F.softmax(query @ query.mT * 0.3 + bias, -1) @ query @ weight)
    return x


@pytest.mark.parametrize(
    ("budget", "is_learned"), one_in(4, [("8KiB", True), ("2KiB", True), ("8KiB", False), ("12KiB", True)])
)
def test_lists_of_a_mask_are_kept_where_what_reads_them_is_computed_again(budget, is_learned):
    """They are elements of what one operator returns as a list, which has no memory by another name."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) / 4 for shape in ((2, 2, 5, 4), (4, 4), (1, 2, 5, 5)))
    learned = [tensor.requires_grad_() for tensor in (x, weight, *((bias,) if is_learned else ()))]
    run = compile_with_glue(attends, memory_budget=budget, passes={**ON["passes"], "specialize_attention": True})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "glue: the memory_budget", GlueWarning)
        found = torch.autograd.grad(run.call(x, weight, bias).sum(), learned)
    (specialized,) = (p for p in run.report.passes if p.name == "specialize_attention")
    assert specialized.counts["listed"] == 3
    assert any(p.changed for p in run.report.passes if p.name == "plan_memory")
    for got, want in zip(found, torch.autograd.grad(attends(x, weight, bias).sum(), learned), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("took", "left"), [(2.0, 8.0), (9.9, 5.0), (30.0, 5.0)])
def test_a_simpler_plan_has_the_time_that_the_first_one_left_or_half_of_it_all(took, left):
    """Less is enough for the first ways to cut a large model alone."""
    clock = itertools.count().__next__
    report = report_of_a_plan(took)
    simpler = plan_memory.PlanMemory(clock=clock).simpler(report, excess=0)
    assert (simpler.moves, simpler.limits, simpler.clock, simpler.seconds) == (False, (), clock, pytest.approx(left))
    assert simpler.simpler(report, excess=0) is None


def test_a_plan_that_is_missed_is_made_tighter_twice_before_its_moves_are_given_up():
    """For less than it took, with what waiting calls hold, or the same plan would fit again."""
    report = report_of_a_plan(1.0)
    tighter = plan_memory.PlanMemory().simpler(report, excess=70)
    assert (tighter.moves, tighter.limits) == (True, (400 - 70,))
    again = tighter.simpler(report, excess=5)
    assert (again.moves, again.limits) == (True, (330, 395))
    unmoved = again.simpler(report, excess=5)
    assert (unmoved.moves, unmoved.limits) == (False, ())
    smallest = dataclasses.replace(report, counts={**report.counts, "least_peak": report.counts["peak"]})
    assert not plan_memory.PlanMemory().simpler(smallest, excess=70).moves


def report_of_a_plan(seconds):
    counts = {"moved_bytes": 1, "peak": 100, "held": 400, "least_peak": 8}
    return PassReport(
        name="plan_memory",
        stage=Stage.JOINT,
        numerics=Numerics.BITWISE,
        changed=True,
        counts=counts,
        milliseconds=seconds * 1e3,
    )
