"""Proves of a loop over the hit experts, which was traced as a loop over all, that both compute the same."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from glue_compiler.expert_capture import HITS, LOOP, UnrolledLoop
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.values import value_of
from glue_compiler.graph_pass import Skip
from glue_compiler.passes.group_experts.analysis import ExpertLoop
from glue_compiler.passes.group_experts.row_sets import EXPERT, RowSets

_GREATER = {torch.greater, torch.gt, operator.gt, "gt", "greater", "__gt__"}
_SUM = {torch.sum, "sum"}


def proved_loops(
    gm: fx.GraphModule, loops: list[ExpertLoop], numbers: dict[fx.Node, int], analysis: EffectAnalysis
) -> tuple[list[UnrolledLoop], list[Skip]]:
    """The unrolled loops of ``gm`` of which nothing but grouped loops is in the graph.

    An iteration for an expert that is not hit must add nothing. It is proved when all that the body traced is part of a
    grouped loop, which adds nothing for an expert without rows, or is dead; and when an expert with rows is hit,
    because the vector that the loop iterates over counts the rows of the very mask that the body selects with.
    """
    proved, skips = [], []
    for hits in [node for node in gm.graph.nodes if HITS in node.meta]:
        unrolled: UnrolledLoop = hits.meta[HITS]
        reason = _unproved(gm, hits, unrolled, loops, numbers, analysis)
        if reason:
            skips.append(Skip(f"a loop over the hit experts stays as Dynamo has it: {reason}", hits.name))
        else:
            proved.append(unrolled)
    return proved, skips


def _unproved(
    gm: fx.GraphModule,
    hits: fx.Node,
    unrolled: UnrolledLoop,
    loops: list[ExpertLoop],
    numbers: dict[fx.Node, int],
    analysis: EffectAnalysis,
) -> str | None:
    if unrolled.leaves_a_trace:
        return "its body changes a Python object"
    traced = [node for node in gm.graph.nodes if node.meta.get(LOOP) is unrolled]
    mine = [loop for loop in loops if any(sink.node in traced for sink in loop.sinks)]
    selected = _counted(hits)
    if selected is None:
        return "what it iterates over is not the nonzero positions of the row counts of a mask"
    for loop in mine:
        if numbers.get(loop.selected, loop.selected) != numbers.get(selected, selected):
            return "it iterates over the experts of another routing than its body uses"
    inside = {node for loop in mine for node in loop.absorbed}
    left: set[fx.Node] = set()
    for node in reversed(traced):
        dead = analysis.of(gm, node).kind is Kind.PURE and all(user in left for user in node.users)
        if node in inside or dead:
            left.add(node)
        else:
            return f"'{node.name}' of its body is not part of a grouped loop"
    return None


def _counted(hits: fx.Node) -> fx.Node | None:
    """``selected``, for ``(mask.sum(dims) > 0).nonzero()`` with its mask summed over all but the experts."""
    greater: Any = hits.args[0]
    if not isinstance(greater, fx.Node) or greater.target not in _GREATER or len(greater.args) != 2:
        return None
    total: Any = greater.args[0]
    if greater.args[1] != 0 or not isinstance(total, fx.Node) or total.target not in _SUM:
        return None
    mask = RowSets().mask(total.args[0])
    dims = total.args[1] if len(total.args) > 1 else total.kwargs.get("dim")
    if mask is None or mask.expert is not None or not isinstance(dims, tuple | list):
        return None
    rank = len(mask.axes)
    kept = [axis for i, axis in enumerate(mask.axes) if i not in {dim % rank for dim in dims}]
    return mask.selected if kept == [EXPERT] and value_of(greater).dim() == 1 else None
