"""Finds the row sets that loops over experts look for one by one, and that one sort finds for all. Changes nothing.

What the loops do with their rows is nobody's business here: the sort gives the same indices in the same order.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from glue_compiler.fx.operators import Operators
from glue_compiler.fx.values import value_of
from glue_compiler.passes.group_experts.left_alone import LeftAlone
from glue_compiler.passes.group_experts.planner import LoopPlanner
from glue_compiler.passes.group_experts.row_sets import IDS, SLOT, TOKEN, RowSet, RowSets

_AXES = ((TOKEN,), (TOKEN, SLOT), (SLOT, TOKEN))


@dataclass(frozen=True)
class SlicedRows:
    """Row sets of several experts that are slices of one sorted batch."""

    selected: fx.Node
    axes: tuple[str, ...]
    """What each column of indices is."""
    first_expert: int
    rows: tuple[RowSet, ...]
    """Of each expert from the first on."""

    @property
    def num_experts(self) -> int:
        return len(self.rows)

    @property
    def first(self) -> fx.Node:
        """Where the sort is written."""
        return min(rows.root for rows in self.rows)


def plan_slices(gm: fx.GraphModule, operators: Operators, grouped: Collection[fx.Node]) -> list[SlicedRows]:
    """Args: grouped: nodes that are gone once the grouped loops are written."""
    sets = RowSets(operators)
    nodes = [node for node in gm.graph.nodes if node in operators.numbering.numbers and node not in grouped]
    found = [rows for node in nodes if (rows := sets.row_set(node))]
    families: dict[object, list[RowSet]] = defaultdict(list)
    seen: Counter[object] = Counter()
    for rows in found:
        if _is_of_indices(rows, operators):
            key = (operators.number(rows.mask.selected), rows.mask.axes)
            # Two loops over one routing have two row sets for each expert, whose numbers have two names.
            seen[key, rows.expert] += 1
            families[key, seen[key, rows.expert]].append(rows)
    several = [family for family in families.values() if len(family) > 1]
    if not several:
        return []
    planner = LoopPlanner(gm, operators)
    return [sliced for family in several if (sliced := _sliced(family, planner)) is not None]


def _is_of_indices(rows: RowSet, operators: Operators) -> bool:
    """``where`` or ``nonzero`` of one expert, in a form whose order is known, and that a slice can stand for."""
    value = value_of(rows.root)
    if rows.mask.axes not in _AXES or rows.mask.any_slot or operators.meta(rows.mask.selected).dtype not in IDS:
        return False
    if isinstance(value, torch.Tensor):
        return value.dim() == 2
    items = [user.args[1] if user.target is operator.getitem else None for user in rows.root.users]
    return isinstance(value, tuple | list) and all(type(item) is int for item in items)


def _sliced(family: list[RowSet], planner: LoopPlanner) -> SlicedRows | None:
    """None if the experts are no range, or what selects the rows changes between the first and the last."""
    in_order = sorted(family, key=lambda rows: rows.expert)
    experts = [rows.expert for rows in in_order]
    if experts[0] < 0 or experts != list(range(experts[0], experts[0] + len(experts))):
        return None
    inside = {node for rows in family for node in (*rows.mask.nodes, rows.root)}
    last = max(family, key=lambda rows: planner.position[rows.root]).root
    try:
        planner.check_unwritten(inside, last, writers=())
    except LeftAlone:
        return None
    mask = family[0].mask
    selected = planner.operators.operand(mask.selected, min(rows.root for rows in family))
    return SlicedRows(selected, mask.axes, experts[0], tuple(in_order)) if selected is not None else None
