"""Writes a loop over pieces of sorted rows, which was proved to be one grouped computation, as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import equal_sizes
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.group_experts.grouped_body import Emitter, GroupedBody
from glue_compiler.passes.group_experts.segment_bodies import Segment
from glue_compiler.passes.group_experts.segments import SegmentLoop
from glue_compiler.passes.group_experts.steps import Step


def group_segments(gm: fx.GraphModule, loops: Sequence[SegmentLoop], analysis: EffectAnalysis) -> None:
    """Write the grouped form of each loop where it ends, and erase the loops with the numbers that only they read."""
    offsets: dict[tuple[fx.Node, int], fx.Node] = {}
    for loop in loops:
        emit = Emitter(gm, (*loop.results, loop.last), analysis, loop.autocast)
        key = (loop.counts, loop.num_experts)
        if key not in offsets:
            with gm.graph.inserting_after(loop.counts):
                offsets[key] = _offsets(emit, loop)
        with gm.graph.inserting_before(loop.last):
            if loop.checks_counts:
                _check_counts(emit, loop)
            rows = _GroupedSegments(emit, loop, loop.source, offsets[key]).compute(len(loop.steps) - 1)
            wanted = value_of(loop.result)
            if value_of(rows).dtype != wanted.dtype:
                rows = emit.method("to", rows, wanted.dtype)
        shape_env = getattr(analysis.fake_mode, "shape_env", None)
        if shape_env is not None:
            equal_sizes.assume_equal(shape_env, expression(wanted.shape[0]), expression(value_of(loop.source).shape[0]))
        _replace(gm, loop, rows)
    _erase_numbers(gm, loops)
    gm.recompile()


def _offsets(emit: Emitter, loop: SegmentLoop) -> fx.Node:
    counts = loop.counts
    counted = value_of(counts).shape[0]
    with_dtype = {"dtype": torch.int32}
    if counted == loop.num_experts:
        return emit.call(torch.cumsum, counts, 0, **with_dtype)
    first = emit.method("narrow", counts, 0, 0, loop.num_experts)
    with emit.graph.inserting_after(first):
        return emit.call(torch.cumsum, first, 0, **with_dtype)


def _check_counts(emit: Emitter, loop: SegmentLoop) -> None:
    """What ``split``, or the assignment of all rows, checked on the host is checked on the device."""
    rows: Any = value_of(loop.source).shape[0]
    if isinstance(rows, torch.SymInt):
        rows = emit.call(torch.ops.aten.sym_size.int, loop.source, 0)
    fits = emit.call(torch.eq, emit.method("sum", loop.counts), rows)
    positive = emit.method("all", emit.call(torch.ge, loop.counts, 0))
    message = "the experts' numbers of rows must not be negative, and sum to the number of rows"
    emit.call(torch.ops.aten._assert_async.msg, emit.call(torch.logical_and, fits, positive), message)


def _replace(gm: fx.GraphModule, loop: SegmentLoop, rows: fx.Node) -> None:
    result = loop.result
    for write in loop.writes:
        gm.graph.erase_node(write.node)
    result.replace_all_uses_with(rows)
    gm.graph.erase_node(result)
    for node in reversed(gm.graph.nodes):
        if node in loop.absorbed and not node.users:
            gm.graph.erase_node(node)


def _erase_numbers(gm: fx.GraphModule, loops: Sequence[SegmentLoop]) -> None:
    """All numbers read from one vector of counts, unless something else needs one of them.

    Then the checks stay too: tracing needs to know that the numbers are sizes.
    """
    by_counts: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for loop in loops:
        by_counts[loop.counts] |= loop.numbers
    present = set(gm.graph.nodes)
    for numbers in by_counts.values():
        left = numbers & present
        if all(user in left for node in left for user in node.users):
            for node in sorted(left, reverse=True):
                gm.graph.erase_node(node)


class _GroupedSegments(GroupedBody):
    def _leaf(self, step: Step) -> fx.Node:
        assert isinstance(step, Segment)
        return step.source
