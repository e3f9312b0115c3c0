"""Proves of code that was traced although it might not have run that running it does nothing then."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from glue_compiler.capture.regions import HITS, REGIONS, NonEmptyBranch, SpeculativeRegion, UnrolledLoop
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.values import source_line, value_of
from glue_compiler.graph_pass import Skip
from glue_compiler.passes.group_experts.analysis import ExpertLoop
from glue_compiler.passes.group_experts.row_branches import unproved_branch
from glue_compiler.passes.group_experts.row_sets import RowSets, counts_by_expert
from glue_compiler.passes.group_experts.segments import SegmentLoop
from glue_compiler.passes.group_experts.steps import Product, Stacked


def proved_regions(
    gm: fx.GraphModule,
    loops: Sequence[ExpertLoop],
    segments: Sequence[SegmentLoop],
    written: Collection[fx.Node],
    operators: Operators,
) -> tuple[list[SpeculativeRegion], list[Skip]]:
    """The speculative regions of ``gm`` that do nothing for an expert without rows.

    All that such a region traced is part of a grouped loop, which adds nothing for an expert without rows, or is dead.
    It does run for an expert with rows: an unrolled loop iterates over the row counts of the very mask that its body
    selects with, and a branch asks for the number of rows that its region adds.

    Args:
        written: the nodes of the grouped forms.
    """
    proved: list[SpeculativeRegion] = []
    skips = []
    unrolled: dict[SpeculativeRegion, fx.Node] = {n.meta[HITS]: n for n in gm.graph.nodes if HITS in n.meta}
    traced: dict[SpeculativeRegion, list[fx.Node]] = {region: [] for region in unrolled}
    for node in gm.graph.nodes:
        for region in node.meta.get(REGIONS, ()):
            traced.setdefault(region, []).append(node)
    inside = {*written, *(node for loop in loops for node in loop.absorbed)}
    inside |= {node for loop in segments for node in loop.absorbed | loop.numbers}
    for region, nodes in traced.items():
        reason = _left_over(gm, region, nodes, inside, operators.analysis)
        if not reason and isinstance(region, UnrolledLoop):
            mine = [loop for loop in loops if any(sink.node in nodes for sink in loop.sinks)]
            reason = _counts_others(region, unrolled.get(region), mine, operators)
        if not reason and isinstance(region, NonEmptyBranch):
            reason = unproved_branch(gm, region, nodes, loops, segments, operators)
        if reason:
            place = unrolled.get(region) or nodes[0]
            what = "loop over the hit experts" if isinstance(region, UnrolledLoop) else "branch on the number of rows"
            skips.append(Skip(f"a {what} stays as Dynamo has it: {reason}", place.name, source_line(place)))
        else:
            proved.append(region)
    return proved, skips


def _left_over(
    gm: fx.GraphModule,
    region: SpeculativeRegion,
    traced: list[fx.Node],
    inside: Collection[fx.Node],
    analysis: EffectAnalysis,
) -> str | None:
    if region.harm is not None:
        return region.harm
    if region.is_running():
        return "the graph ends inside of it"
    left: set[fx.Node] = set()
    for node in reversed(traced):
        dead = analysis.of(gm, node).kind is Kind.PURE and all(user in left or user in inside for user in node.users)
        if node in inside or dead:
            left.add(node)
        else:
            return f"'{node.name}' of its code is not part of a grouped loop"
    return None


def _counts_others(
    region: UnrolledLoop, hits: fx.Node | None, loops: Sequence[ExpertLoop], operators: Operators
) -> str | None:
    selected = _counted(hits, operators) if hits is not None else None
    if selected is None:
        return "what it iterates over is not the nonzero positions of the row counts of a mask"
    if 0 in operators.meta(selected).shape:
        # Then no expert is hit, nothing is computed, and what nothing was added to needs no gradient.
        return "there are no tokens"
    if any(operators.number(loop.routing) != operators.number(selected) for loop in loops):
        return "it iterates over the experts of another routing than its body uses"
    if region.is_shortened and not any(_ends_at(loop, region.length) for loop in loops):
        return "the mask has a class more than the loop was traced for"
    return None


def _ends_at(loop: ExpertLoop, length: int) -> bool:
    """Do stacked weights have ``length`` experts? Then the body fails for the next one."""
    stacks = [step.weight for step in loop.steps if isinstance(step, Product) and isinstance(step.weight, Stacked)]
    return any(value_of(stack.base).shape[0] == length for stack in stacks)


def _counted(hits: fx.Node, operators: Operators) -> Value | None:
    """``selected``, for ``(mask.sum(dims) > 0).nonzero()`` with its mask summed over all but the experts."""
    match operators.does(operators.value(hits)):
        case Call(torch.ops.aten.nonzero, {"self": Value() as hit}) if operators.is_fixed(operators.value(hits)):
            pass
        case _:
            return None
    match operators.does(hit):
        case Call(torch.ops.aten.gt | torch.ops.aten.greater, {"self": Value() as total, "other": 0}):
            mask = counts_by_expert(total, RowSets(operators))
            return mask.selected if mask is not None else None
    return None
