"""Proves of a branch on the number of an expert's rows that what it skips would do nothing if there are none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.capture.regions import NonEmptyBranch
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.values import value_of
from glue_compiler.passes.group_experts.analysis import ExpertLoop
from glue_compiler.passes.group_experts.boundaries import Boundaries, Boundary
from glue_compiler.passes.group_experts.row_sets import COUNT_DTYPES, RowSet, RowSets
from glue_compiler.passes.group_experts.segments import SegmentLoop

aten = torch.ops.aten


def unproved_branch(
    gm: fx.GraphModule,
    region: NonEmptyBranch,
    traced: Collection[fx.Node],
    loops: Sequence[ExpertLoop],
    segments: Sequence[SegmentLoop],
    operators: Operators,
) -> str | None:
    """None if proved, else why not. All that was traced is known to be part of ``loops`` and ``segments``, or dead.

    - The branch asks for the number of rows of the very expert whose rows it skips.
    - Local names that later iterations read hold the same number before and after it, if the expert has no rows.
    - Lists that it appends to are joined as a whole, where an expert's empty rows make no difference: unless all
      experts' are empty, which they are not.
    """
    condition = region.condition
    assert condition is not None
    present = set(gm.graph.nodes)
    boundaries = Boundaries(operators, present & operators.numbering.numbers.keys())
    asked = boundaries.of(condition.number) if condition.number in present else None
    held_nodes = [value for held in region.carried.values() for value in held if isinstance(value, fx.Node)]
    for node in (condition.number, *held_nodes):
        if (
            node in present
            and isinstance(value_of(node), torch.Tensor)
            and not operators.is_fixed(operators.value(node))
        ):
            return f"'{node.name}', which it depends on, is written"
    for rows in [sink.rows for loop in loops for sink in loop.sinks if sink.node in traced]:
        if rows.count != condition.symbol and not (
            condition.number in present and _is_of(condition.number, rows, operators)
        ):
            return "it asks for another number than that of the rows that are added"
    for loop in segments:
        for place, count in zip(_places(loop), loop.row_counts, strict=True):
            if place in traced and count != asked:
                return "it asks for another number than that of the rows of its piece"
    for name, held in region.carried.items():
        if not _is_kept(held, condition.symbol, asked, boundaries, present):
            return f"'{name}' may have another value after an expert without rows"
    for name, growth in region.grown.items():
        if not all(_is_joined(region.joined.get(call), traced, segments) for call in growth.calls) or not growth.calls:
            return f"the list '{name}' is not only joined to the rows of all experts, of which there are some"
    return None


def _places(loop: SegmentLoop) -> Sequence[fx.Node]:
    """Where the rows of each expert come into the result."""
    return [write.node for write in loop.writes] or loop.results


def _is_of(number: fx.Node, rows: RowSet, operators: Operators) -> bool:
    """Does ``number`` say whether the mask of these rows has any?"""
    value = operators.value(number)
    match operators.does(value):
        case Call(aten.any | aten.sum | aten.count_nonzero, {"self": Value() as mask}):
            read = RowSets(operators).mask(mask)
        case _:
            return False
    meta = operators.meta(value)
    if read is None or operators.number(read.selected) != operators.number(rows.mask.selected):
        return False
    return read.expert == rows.expert and meta.rank == 0 and meta.dtype in (torch.bool, *COUNT_DTYPES)


def _is_kept(
    held: Sequence[Any], symbol: Any, asked: Boundary | None, boundaries: Boundaries, present: Collection[fx.Node]
) -> bool:
    """Held before and after: do they differ by the number that is zero, or not at all? The last one's is not used."""
    if len(held) == 1:
        return True
    if any(isinstance(value, fx.Node) and value not in present for value in held):
        return False
    if not any(value is None or isinstance(value, fx.Node) for value in held):
        return held[1] - held[0] in (0, symbol)
    before, after = (boundaries.of(value) for value in held)
    return before is not None and after is not None and after.plus(before, -1) in (Boundary(), asked)


def _is_joined(cat: fx.Node | None, traced: Collection[fx.Node], segments: Sequence[SegmentLoop]) -> bool:
    """By the end of a loop that has some row, with one part from this branch."""
    for loop in segments:
        if loop.last is cat and loop.has_rows:
            return sum(result in traced for result in loop.results) == 1
    return False
