"""Proves of code that was traced although it might not have run that running it does nothing then.

Such a region is a loop over all experts that eager code runs for those that are hit, or what a branch skips for an
expert without rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.capture.regions import HITS, REGIONS, NonEmptyBranch, SpeculativeRegion, UnrolledLoop
from glue_compiler.fx.effects import Kind
from glue_compiler.fx.operators import Call, Value
from glue_compiler.fx.values import makes_tensor, value_of
from glue_compiler.passes.group_experts.checks import ReadGraph
from glue_compiler.passes.group_experts.counts import COUNT_DTYPES, CountSums, counts_by_expert
from glue_compiler.passes.group_experts.plan import Concatenation, GroupedLoop, RoutedRows, SortedRows
from glue_compiler.passes.group_experts.row_sets import RowSet
from glue_compiler.passes.group_experts.steps import Product, Stacked
from glue_compiler.pipeline.results import Skip

aten = torch.ops.aten


def proved_regions(
    graph: ReadGraph, loops: Sequence[GroupedLoop], written: Collection[fx.Node]
) -> tuple[list[SpeculativeRegion], list[Skip]]:
    """The speculative regions of a graph that do nothing for an expert without rows.

    All that such a region traced is part of a grouped loop, which adds nothing for an expert without rows, or is dead.
    It does run for an expert with rows: an unrolled loop iterates over the row counts of the very mask that its body
    selects with, and a branch asks for the number of rows that its region adds.

    Args:
        written: the nodes of the grouped forms, which stand beside the loops.
    """
    gm = graph.gm
    proved: list[SpeculativeRegion] = []
    skips = []
    unrolled: dict[SpeculativeRegion, fx.Node] = {n.meta[HITS]: n for n in gm.graph.nodes if HITS in n.meta}
    traced: dict[SpeculativeRegion, list[fx.Node]] = {region: [] for region in unrolled}
    for node in gm.graph.nodes:
        for region in node.meta.get(REGIONS, ()):
            traced.setdefault(region, []).append(node)
    inside = {*written, *(node for loop in loops for node in loop.absorbed | loop.numbers)}
    for region, nodes in traced.items():
        reason = _left_over(graph, region, nodes, inside)
        if not reason and isinstance(region, UnrolledLoop):
            mine = [loop for loop in loops if any(sink.node in nodes for sink in loop.sinks)]
            reason = _counts_others(region, unrolled.get(region), mine, graph)
        if not reason and isinstance(region, NonEmptyBranch):
            reason = _unproved_branch(graph, region, nodes, loops)
        if reason:
            place = unrolled.get(region) or nodes[0]
            what = "loop over the hit experts" if isinstance(region, UnrolledLoop) else "branch on the number of rows"
            skips.append(Skip.at(place, f"a {what} stays as Dynamo has it: {reason}"))
        else:
            proved.append(region)
    return proved, skips


def _left_over(
    graph: ReadGraph, region: SpeculativeRegion, traced: list[fx.Node], inside: Collection[fx.Node]
) -> str | None:
    if region.harm is not None:
        return region.harm
    if region.is_running():
        return "the graph ends inside of it"
    left: set[fx.Node] = set()
    for node in reversed(traced):
        dead = graph.effects[node].kind is Kind.PURE and all(user in left or user in inside for user in node.users)
        if node in inside or dead:
            left.add(node)
        else:
            return f"'{node.name}' of its code is not part of a grouped loop"
    return None


def _counts_others(
    region: UnrolledLoop, hits: fx.Node | None, loops: Sequence[GroupedLoop], graph: ReadGraph
) -> str | None:
    """``loops``: those whose rows it adds."""
    selected = _counted(hits, graph) if hits is not None else None
    if selected is None:
        return "what it iterates over is not the nonzero positions of the row counts of a mask"
    if 0 in graph.operators.shape(selected):
        # Then no expert is hit, nothing is computed, and what nothing was added to needs no gradient.
        return "there are no tokens"
    number = graph.operators.number
    partitions = [loop.partition for loop in loops]
    if any(isinstance(each, RoutedRows) and number(each.routing) != number(selected) for each in partitions):
        return "it iterates over the experts of another routing than its body uses"
    if region.is_shortened and not any(_ends_at(loop, region.length) for loop in loops):
        return "the mask has a class more than the loop was traced for"
    return None


def _ends_at(loop: GroupedLoop, length: int) -> bool:
    """Do stacked weights have ``length`` experts? Then the body fails for the next one."""
    stacks = [step.weight for step in loop.steps if isinstance(step, Product) and isinstance(step.weight, Stacked)]
    return any(value_of(stack.base).shape[0] == length for stack in stacks)


def _counted(hits: fx.Node, graph: ReadGraph) -> Value | None:
    """``selected``, for ``(mask.sum(dims) > 0).nonzero()`` with its mask summed over all but the experts."""
    operators = graph.operators
    match operators.does(operators.value(hits)):
        case Call(aten.nonzero, {"self": Value() as hit}) if operators.is_fixed(operators.value(hits)):
            pass
        case _:
            return None
    match operators.does(hit):
        case Call(aten.gt, {"self": Value() as total, "other": 0}):
            mask = counts_by_expert(total, graph.sets)
            return mask.selected if mask is not None else None
    return None


# -- branches on the number of rows


def _unproved_branch(
    graph: ReadGraph, region: NonEmptyBranch, traced: Collection[fx.Node], loops: Sequence[GroupedLoop]
) -> str | None:
    """None if proved, else why not. All that was traced is known to be part of ``loops``, or dead.

    - The branch asks for the number of rows of the very expert whose rows it skips.
    - Local names that later iterations read hold the same number before and after it, if the expert has no rows.
    - Lists that it appends to are joined as a whole, where an expert's empty rows make no difference: unless all
      experts' are empty, which they are not.
    """
    condition = region.condition
    assert condition is not None
    operators, present = graph.operators, graph.position.keys()
    asked = graph.sums.of(condition.number) if condition.number in present else None
    held_nodes = [value for held in region.carried.values() for value in held if isinstance(value, fx.Node)]
    for node in (condition.number, *held_nodes):
        if node in present and makes_tensor(node) and not operators.is_fixed(operators.value(node)):
            return f"'{node.name}', which it depends on, is written"
    for rows in [sink.rows for loop in loops for sink in loop.sinks if sink.node in traced]:
        if rows.count != condition.symbol and not (
            condition.number in present and _is_of(condition.number, rows, graph)
        ):
            return "it asks for another number than that of the rows that are added"
    for partition, end in [(loop.partition, loop.end) for loop in loops]:
        if isinstance(partition, SortedRows) and isinstance(end, Concatenation):
            places = [write.node for write in end.writes] or end.results
            if any(at in traced and n != asked for at, n in zip(places, partition.lengths, strict=True)):
                return "it asks for another number than that of the rows of its piece"
    for name, held in region.carried.items():
        if not _is_kept(held, condition.symbol, asked, graph.sums, present):
            return f"'{name}' may have another value after an expert without rows"
    for name, growth in region.grown.items():
        if not all(_is_joined(region.joined.get(call), traced, loops) for call in growth.calls) or not growth.calls:
            return f"the list '{name}' is not only joined to the rows of all experts, of which there are some"
    return None


def _is_of(number: fx.Node, rows: RowSet, graph: ReadGraph) -> bool:
    """Does ``number`` say whether the mask of these rows has any?"""
    operators = graph.operators
    value = operators.value(number)
    match operators.does(value):
        case Call(aten.any | aten.sum | aten.count_nonzero, {"self": Value() as mask}):
            read = graph.sets.mask(mask)
        case _:
            return False
    meta = operators.meta(value)
    if read is None or operators.number(read.selected) != operators.number(rows.mask.selected):
        return False
    return read.expert == rows.expert and meta.rank == 0 and meta.dtype in (torch.bool, *COUNT_DTYPES)


def _is_kept(held: Sequence[Any], symbol: Any, asked: Any, sums: CountSums, present: Collection[fx.Node]) -> bool:
    """Held before and after: do they differ by the number that is zero, or not at all? The last one's is not used."""
    if len(held) == 1:
        return True
    if any(isinstance(value, fx.Node) and value not in present for value in held):
        return False
    if not any(value is None or isinstance(value, fx.Node) for value in held):
        return held[1] - held[0] in (0, symbol)
    before, after = (sums.of(value) for value in held)
    return before is not None and after is not None and sympy.expand(after - before) in (0, asked)


def _is_joined(cat: fx.Node | None, traced: Collection[fx.Node], loops: Sequence[GroupedLoop]) -> bool:
    """By the end of a loop that has some row, with one part from this branch."""
    for loop in loops:
        if loop.place is cat and isinstance(loop.partition, SortedRows) and loop.partition.has_rows:
            return sum(result in traced for result in loop.end.results) == 1
    return False
