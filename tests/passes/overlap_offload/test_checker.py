"""The checker: it reads final graphs, and finds each way to break a schedule."""

from __future__ import annotations

import copy

import pytest
import torch

from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx.training_pair import TrainingPair, check_pair
from glue_compiler.passes import overlap_offload
from glue_compiler.passes.overlap_offload.checker import Copy, check_copies, check_offload
from tests.captured import compile_with_glue
from tests.passes.overlap_offload.models import Blocks, step

OPS = torch.ops.glue


def test_two_alive_are_allowed_and_three_are_not():
    check_copies([Copy("a", 0, 0, 2, 4), Copy("b", 1, 3, 5, 7), Copy("c", 2, 5, 8, 9)], 2)
    with pytest.raises(GlueInvariantError, match="2 are allowed"):
        check_copies([Copy("a", 0, 0, 2, 4), Copy("b", 1, 3, 5, 7), Copy("c", 2, 4, 8, 9)], 2)


def test_tensors_of_one_region_count_once():
    check_copies([Copy("a", 0, 0, 2, 9), Copy("b", 0, 0, 2, 9), Copy("c", 1, 0, 2, 9)], 2)


def test_a_wait_before_its_start_is_found():
    with pytest.raises(GlueInvariantError, match="out of order"):
        check_copies([Copy("a", 0, 3, 2, 4)], 2)


@pytest.fixture
def final(monkeypatch):
    """The pair and groups of a compiled model after the pass."""
    kept = []
    apply = overlap_offload.apply_schedule

    def keep(pair, *rest):
        groups = apply(pair, *rest)
        kept.append((TrainingPair(copy.deepcopy(pair.forward), copy.deepcopy(pair.backward), pair.num_outputs), groups))
        return groups

    monkeypatch.setattr(overlap_offload, "apply_schedule", keep)
    model = Blocks(4)
    step(compile_with_glue(model, offload="checkpoints").call, model, torch.randn(4, 8))
    pair, groups = kept[0]
    check_offload(pair, groups, 2)
    check_pair(pair)
    return pair, groups


def calls(gm, operator):
    return gm.graph.find_nodes(op="call_function", target=operator.default)


def test_reading_a_buffer_without_its_wait_is_found(final):
    pair, groups = final
    wait = calls(pair.backward, OPS.reload_wait)[0]
    next(iter(wait.users)).replace_input_with(wait, wait.args[0])
    with pytest.raises(GlueInvariantError, match="not by one wait alone"):
        check_offload(pair, groups, 2)


def test_a_host_tensor_that_compute_reads_is_found(final):
    pair, groups = final
    start = calls(pair.backward, OPS.reload_start)[0]
    wait = next(iter(start.users))
    next(iter(wait.users)).replace_input_with(wait, start.args[0])
    with pytest.raises(GlueInvariantError, match="not by one reload"):
        check_offload(pair, groups, 2)


def test_a_source_that_is_not_held_is_found(final):
    pair, groups = final
    first, second = calls(pair.forward, OPS.offload_wait)[:2]
    first.args = (first.args[0], second.args[1], None)
    with pytest.raises(GlueInvariantError, match="does not hold the source"):
        check_offload(pair, groups, 2)


def test_a_host_tensor_saved_without_its_wait_is_found(final):
    pair, groups = final
    wait = calls(pair.forward, OPS.offload_wait)[0]
    pair.forward.graph.output_node().replace_input_with(wait, wait.args[0])
    with pytest.raises(GlueInvariantError, match="not by one wait alone"):
        check_offload(pair, groups, 2)


def test_a_saved_value_that_backward_does_not_take_is_found(final):
    pair, _ = final
    pair.saved[-1].name = "renamed"
    with pytest.raises(GlueInvariantError, match="which backward does not take"):
        check_pair(pair)


def test_saved_tensors_in_another_order_are_found(final):
    pair, _ = final
    output = pair.forward.graph.output_node()
    values = list(output.args[0])
    output.args = ((*values[: pair.num_outputs], *values[pair.num_outputs :][::-1]),)
    with pytest.raises(GlueInvariantError, match="order"):
        check_pair(pair)
