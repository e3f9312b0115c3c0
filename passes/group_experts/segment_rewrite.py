"""Writes a loop over pieces of sorted rows, which was proved to be one grouped computation, as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import equal_sizes
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.group_experts.drafts import Draft, drafted
from glue_compiler.passes.group_experts.grouped_body import Emitter, GroupedBody
from glue_compiler.passes.group_experts.left_alone import LeftAlone
from glue_compiler.passes.group_experts.segment_bodies import Segment
from glue_compiler.passes.group_experts.segments import SegmentLoop
from glue_compiler.passes.group_experts.steps import Step


def draft_segments(gm: fx.GraphModule, loop: SegmentLoop, operators: Operators, offsets: dict[Any, fx.Node]) -> Draft:
    """The grouped form, where the loop ends. Raises LeftAlone if it cannot be written.

    Args:
        offsets: of the loops before, which loops over the same counts share.
    """
    known = dict(offsets)

    def write() -> Callable[[], None]:
        emit = Emitter(gm, (*loop.results, loop.last), operators.analysis, loop.autocast)
        key = (loop.counts, loop.num_experts)
        if key not in known:
            with gm.graph.inserting_before(_after(gm, loop.counts)):
                known[key] = _offsets(emit, loop)
        with gm.graph.inserting_before(loop.last):
            if loop.checks_counts:
                _check_counts(emit, loop)
            rows = _GroupedSegments(emit, operators, loop, loop.source, known[key]).compute(len(loop.steps) - 1)
            wanted = value_of(loop.result)
            if value_of(rows).dtype != wanted.dtype:
                rows = emit.method("to", rows, wanted.dtype)
        got = value_of(rows)
        if (got.dim(), *map(expression, got.stride())) != (wanted.dim(), *map(expression, wanted.stride())):
            raise LeftAlone("the rows of all experts have another layout than what they would replace")
        return lambda: _replace(gm, loop, rows)

    draft = drafted(gm.graph, write)
    offsets.update(known)
    shape_env = getattr(operators.analysis.fake_mode, "shape_env", None)
    if shape_env is not None:
        sizes = [expression(value_of(node).shape[0]) for node in (loop.result, loop.source)]
        equal_sizes.assume_equal(shape_env, *sizes)
    return draft


def _after(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Where what reads ``node`` as it is made may stand; inputs come first."""
    nodes = iter(gm.graph.nodes)
    while next(nodes) is not node:
        pass
    return next(each for each in nodes if each.op != "placeholder")


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


def erase_numbers(gm: fx.GraphModule, loops: Sequence[SegmentLoop]) -> None:
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
    gm.recompile()


class _GroupedSegments(GroupedBody):
    def _leaf(self, step: Step) -> fx.Node:
        assert isinstance(step, Segment)
        return step.source
