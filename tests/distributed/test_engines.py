"""torch's engines on processes of a CPU: losses, gradients and weights are those of one process that has all batches.

Lengths differ on each rank and in each step. Every rewrite that the engine leaves room for is made on every rank.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")

from glue_compiler.handoff import layer_variants
from tests.distributed import engines
from tests.distributed.ranks import Ranks
from tests.distributed.training import Trained, assert_same, reference, train
from tools.fuzz.small_steps import EachRole

pytestmark = pytest.mark.slow

PACKED, LISTED = "specialize_attention.packed", "specialize_attention.listed"
LAYERS = {"num_hidden_layers": 5}
LOSSES, DEFERRED, STATISTICS = "chunk_loss.losses", "chunk_loss.deferred", "chunk_loss.statistics"


def attentions(counts: dict[str, int]) -> int:
    """Those without a mask, however their documents were found: of positions, of a mask known, of its elements."""
    return counts.get(PACKED, 0) + counts.get(LISTED, 0)


def run(family: str, name: str, kind: str, options: dict[str, Any]) -> Trained:
    return train(engines.FAMILIES[family][name], kind, options, {})


def trained(ranks: Ranks, family: str, name: str, kind: str = "qwen3", **options: Any) -> list[Trained]:
    """What the ranks saw, which is what one process sees."""
    engine = engines.FAMILIES[family][name]
    found = ranks.run(run, family, name, kind, options)
    assert_same(found, reference(ranks.number // engine.shares, kind, engine.parts, engine.steps), engine)
    return found


@pytest.mark.parametrize("name", engines.DDP)
def test_ddp(two_ranks, name):
    for each in trained(two_ranks, "ddp", name):
        if name == "layers":
            assert attentions(each.counts) > 0
        elif "small buckets" in name:  # torch cuts the graph for each bucket
            assert attentions(each.counts) > 0
            assert any("DDP has cut the graph into pieces" in skip for skip in each.skips)
        else:
            # Two layers and a loss, compiled for the first length and for all others.
            assert (each.counts[PACKED], each.counts[LOSSES], each.counts[DEFERRED]) == (4, 2, 2)


@pytest.mark.parametrize("name", engines.FSDP)
def test_fsdp(two_ranks, name):
    for each in trained(two_ranks, "fsdp", name):
        assert attentions(each.counts) == 2, each.counts
        assert (each.counts.get(LOSSES) == 2) == (not name.startswith("layers"))


def run_in_regions(name: str, options: dict[str, str]) -> Trained:
    return train(engines.IN_REGIONS[name], "qwen3", options, LAYERS)


@pytest.mark.parametrize("options", [{}, {"regions": "auto"}], ids=["by default", "auto"])
@pytest.mark.parametrize("name", engines.IN_REGIONS)
def test_fsdp_in_regions(two_ranks, name, options):
    """One compile for all layers of a length; their hooks, between which weights are whole, run as in eager.

    With transformers 5.17 and older the hooks are inside of a checkpoint, which Python calls then; what it computes
    again are inputs that are views no more, which is a compile of its own for sizes that vary.
    """
    engine = engines.IN_REGIONS[name]
    found = two_ranks.run(run_in_regions, name, options)
    assert_same(found, reference(2, "qwen3", engine.parts, engine.steps, **LAYERS), engine)
    for each in found:
        assert attentions(each.counts) in (2, 3), each.counts
        assert each.counts[LOSSES] == 2
        assert each.graphs == 8


def run_planned(name: str) -> tuple[Trained, int]:
    plan = EachRole(first=2 * dist.get_rank())  # no layer has the same role on both ranks
    planned = {"memory_on": lambda device: device, "LayerPlan": lambda *_: plan}
    with mock.patch.multiple(layer_variants, **planned):
        found = train(engines.PLANNED[name], "qwen3", {"memory_budget": "1GiB"}, LAYERS)
    return found, plan.asked


@pytest.mark.parametrize("name", engines.PLANNED)
def test_ranks_that_keep_other_layers(two_ranks, name):
    engine = engines.PLANNED[name]
    found = two_ranks.run(run_planned, name)
    assert_same([each for each, _ in found], reference(2, "qwen3", engine.parts, engine.steps, **LAYERS), engine)
    assert {asked for _, asked in found} == {5 * engine.steps * engine.parts}


@pytest.mark.parametrize("name", engines.HSDP)
def test_hsdp(four_ranks, name):
    for each in trained(four_ranks, "hsdp", name):
        assert attentions(each.counts) > 0


@pytest.mark.parametrize("name", engines.TENSOR)
def test_tensor_parallel(two_ranks, name):
    if name.startswith("transformers"):
        pytest.importorskip("transformers.distributed.tensor_parallel")
    for each in trained(two_ranks, "tensor", name, "llama", assume={"ranks_agree": True}):
        assert attentions(each.counts) > 0
        if name.endswith("whole"):  # each rank has half of the head's classes
            assert each.counts[STATISTICS] > 0, each.skips


@pytest.mark.parametrize("name", engines.EXPERTS)
def test_expert_parallel(two_ranks, name):
    """The loops over the experts that a rank has are grouped, the exchange of tokens cuts the graph around them."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    for each in trained(two_ranks, "experts", name, "mixtral"):
        # Two of four experts, in each graph with a loop.
        assert each.counts["group_experts.experts_grouped"] == 2 * each.counts["group_experts.loops_grouped"] > 0
        assert attentions(each.counts) == (1 if name.endswith("layers") else 2)
        assert (each.counts.get(LOSSES) == 2) == name.endswith("whole")
