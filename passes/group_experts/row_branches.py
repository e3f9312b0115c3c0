"""Proves of a branch on the number of an expert's rows that what it skips would do nothing if there are none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.capture.regions import NonEmptyBranch
from glue_compiler.fx.spellings import ANY, SUM
from glue_compiler.passes.group_experts.analysis import ExpertLoop
from glue_compiler.passes.group_experts.boundaries import Boundaries, Boundary
from glue_compiler.passes.group_experts.row_sets import RowSet, RowSets
from glue_compiler.passes.group_experts.segments import SegmentLoop

_COUNT = ANY | SUM | {torch.count_nonzero, "count_nonzero"}


def unproved_branch(
    gm: fx.GraphModule,
    region: NonEmptyBranch,
    traced: Collection[fx.Node],
    loops: Sequence[ExpertLoop],
    segments: Sequence[SegmentLoop],
    numbers: dict[fx.Node, int],
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
    boundaries = Boundaries(numbers)
    asked = boundaries.of(condition.number) if condition.number in present else None
    for rows in [sink.rows for loop in loops for sink in loop.sinks if sink.node in traced]:
        if rows.count != condition.symbol and not _is_of(condition.number, rows, numbers, present):
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


def _is_of(number: fx.Node, rows: RowSet, numbers: dict[fx.Node, int], present: Collection[fx.Node]) -> bool:
    """Does ``number`` say whether the mask of these rows has any?"""
    if number not in present or number.target not in _COUNT or len(number.args) != 1 or number.kwargs:
        return False
    read = RowSets().mask(number.args[0])
    counted = numbers.get(number.args[0])  # type: ignore[arg-type]
    same = {numbers.get(node) for node in rows.mask.nodes} - {None}
    return read is not None and read.expert == rows.expert and counted in same


def _is_kept(
    held: Sequence[Any], symbol: Any, asked: Boundary | None, boundaries: Boundaries, present: Collection[fx.Node]
) -> bool:
    """Held before and after: do they differ by the number that is zero, or not at all? After the last, nobody asks."""
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
