"""A step whose marks are refused, or miss what they are for, is compiled with simpler ones or without."""

from __future__ import annotations

import functools
import re
import warnings

import pytest
import torch
from torch import nn
from torch._functorch import partitioners
from torch.utils.checkpoint import CheckpointPolicy

from glue_compiler.compat import offload_policies
from glue_compiler.errors import GlueWarning
from glue_compiler.fx import joint_graphs
from glue_compiler.ops.device_rates import Rates
from glue_compiler.options import GlueOptions
from glue_compiler.passes import plan_memory
from glue_compiler.passes.plan_memory import moves
from glue_compiler.passes.share_layers import ShareLayers
from glue_compiler.pipeline import registry
from glue_compiler.pipeline.graph_pass import PairPass
from glue_compiler.pipeline.marked_partition import _excess
from glue_compiler.pipeline.run import Pipeline
from glue_compiler.testing import capture
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Block, Blocks, step
from tests.passes.share_layers.models import Layers, ids, layers

ON = {"plan_memory": True}
INSISTED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)


class Plain(nn.Module):
    def __init__(self, count=3, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def planned(model, x, says, budget=1, **options):
    """The reports of a step, which warns of what ``says`` matches, and computes what eager does."""
    run = compile_with_glue(model, memory_budget=budget, passes=ON, strict=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = step(run.call, model, x)
    messages = [str(each.message) for each in caught if issubclass(each.category, GlueWarning)]
    assert any(re.search(says, message) for message in messages) if says else not messages, messages
    for got, want in zip(found, step(model, model, x), strict=True):
        torch.testing.assert_close(got, want)
    return {report.name: report for report in run.report.passes}


@pytest.fixture
def refuse(monkeypatch):
    """The partitioner raises for graphs with such a node."""
    own = partitioners.min_cut_rematerialization_partition

    def refuse_if(is_wrong):
        @functools.wraps(own)  # of its signature, by which glue knows it
        def partition(joint, *args, **kwargs):
            if any(map(is_wrong, joint.graph.nodes)):
                raise RuntimeError("AOT Autograd failed to partition\nand a long text")
            return own(joint, *args, **kwargs)

        monkeypatch.setattr(partitioners, "min_cut_rematerialization_partition", partition)

    return refuse_if


@pytest.fixture
def hides_all(monkeypatch):
    monkeypatch.setattr(moves, "LEAST", 0.0)
    monkeypatch.setattr(plan_memory, "rates_of", lambda device: Rates(flops=1e9, memory=1e8, link=1e12))


def test_marks_that_the_partitioner_refuses_are_taken_back(refuse):
    refuse(lambda node: node.meta.get("recompute") in INSISTED)
    says = r"plan_memory.*refuses its marks.*failed to partition\)"
    report = planned(Plain(), torch.randn(8, 16), says)["plan_memory"]
    assert not report.changed
    assert report.error == "RuntimeError: AOT Autograd failed to partition"
    assert any("refuses" in skip.reason for skip in report.skips)
    assert not report.rewrites


def test_with_strict_a_refusal_is_raised(refuse):
    refuse(lambda node: node.meta.get("recompute") in INSISTED)
    run = compile_with_glue(Plain(), memory_budget=1, passes=ON)
    with pytest.raises(Exception, match="failed to partition"):
        step(run.call, nn.Linear(1, 1), torch.randn(8, 16, requires_grad=True))


def test_a_plan_whose_moves_are_refused_is_made_again_without(refuse, hides_all):
    refuse(offload_policies.is_planned)
    model, x = Plain(8), torch.randn(256, 16)
    found = planned(model, x, "refuses its marks", budget=350_000)["plan_memory"]
    assert found.changed
    assert found.counts["moved_bytes"] == 0
    assert found.counts["recomputed"] > 0


def test_a_plan_that_misses_its_budget_is_made_again_for_less_and_keeps_its_moves(hides_all, monkeypatch):
    model, x = Plain(8), torch.randn(256, 16)
    loose = planned(model, x, None, budget=350_000)["plan_memory"]
    torch._dynamo.reset()
    misses = iter([60_000, 60_000, 0])  # the pair, and as it is finished; then that of the second plan
    monkeypatch.setattr(plan_memory.PlanMemory, "excess", lambda self, pair, context: next(misses))
    tight = planned(model, x, None, budget=350_000)["plan_memory"]
    assert loose.counts["moved_bytes"] > 0
    assert tight.counts["moved_bytes"] > 0
    assert tight.counts["peak"] <= 0.97 * 350_000 - 60_000 < loose.counts["peak"]
    assert any("missed by 60000" in skip.reason for skip in tight.skips)


def test_a_plan_that_cannot_be_made_or_written_leaves_the_step_as_it_was(monkeypatch):
    def fail(*args, **kwargs):
        raise KeyError("no plan")

    with monkeypatch.context() as patch:
        patch.setattr(plan_memory, "plan_memory", fail)
        made = planned(Blocks(3), torch.randn(8, 8), "plan_memory failed \\(KeyError")["plan_memory"]
    torch._dynamo.reset()
    # The user's marks are off the graph by then.
    monkeypatch.setattr(joint_graphs, "mark", fail)
    written = planned(Blocks(3), torch.randn(8, 8), "plan_memory failed \\(KeyError")
    assert not made.changed
    assert not written["plan_memory"].changed
    assert written["overlap_offload"].counts["regions"] == 3


@pytest.mark.slow
def test_of_a_plan_and_the_models_own_checkpoints_the_lower_peak_is_taken(monkeypatch):
    """A planner that is wrong about what fits."""
    own = plan_memory.plan_memory
    monkeypatch.setattr(
        plan_memory, "plan_memory", lambda step, rates, budget, *a, **k: own(step, rates, 2**40, *a, **k)
    )
    model, x = Blocks(5, 16), torch.randn(256, 16)
    kept = planned(model, x, None, budget=2**40)["plan_memory"]
    torch._dynamo.reset()
    found = planned(model, x, None, budget=int(0.8 * kept.counts["peak"]))
    assert not found["plan_memory"].changed
    assert len(found["plan_memory"].skips) == 1 + plan_memory.TIGHTER
    assert all("missed by" in skip.reason for skip in found["plan_memory"].skips)
    assert not found["plan_memory"].counts
    assert found["overlap_offload"].counts["predicted_peak"] <= found["overlap_offload"].counts["memory_budget"]


def test_without_checkpoints_the_plan_stays_where_it_is_the_lower_one():
    found = planned(Plain(5), torch.randn(256, 16), "cannot be kept")["plan_memory"]
    assert found.changed
    assert not found.skips


@pytest.mark.slow
def test_numbers_of_rewrites_are_those_of_what_was_taken(hides_all, monkeypatch):
    """``glue bisect`` counts them."""
    monkeypatch.setattr(plan_memory.PlanMemory, "excess", lambda self, pair, context: 1)
    run = compile_with_glue(Plain(8), memory_budget=350_000, passes=ON)
    step(run.call, nn.Linear(1, 1), torch.randn(256, 16, requires_grad=True))
    numbers = [rewrite.number for report in run.report.passes for rewrite in report.rewrites]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.slow
def test_what_changes_no_peak_does_not_run_where_a_step_is_tried_out_for_its_peak(monkeypatch):
    seen = []
    monkeypatch.setattr(ShareLayers, "run_pair", lambda self, *given: seen.append(given))
    (pair,) = capture(Layers(layers(12)), ids(64), stage="partitioned")
    pipeline = Pipeline(registry.all_passes(), GlueOptions(memory_budget=1, compiler="aot_eager"))
    on_pairs = [each for each in pipeline.step_passes(pair.forward) if isinstance(each, PairPass)]
    assert {each.name: each.changes_peak for each in on_pairs} == {"overlap_offload": True, "share_layers": False}
    assert _excess(pipeline, plan_memory.PlanMemory(), on_pairs, (pair.forward, pair.backward), pair.num_outputs) > 0
    assert not seen
