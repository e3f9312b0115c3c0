"""Reads the loops over experts of one graph. Changes nothing."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Collection

import torch

from glue_compiler.fx.operators import Operators
from glue_compiler.fx.values import value_of
from glue_compiler.passes.group_experts.checks import ReadGraph
from glue_compiler.passes.group_experts.plan import GroupedLoop, LeftAlone, Plan, RoutedRows, RowIndices
from glue_compiler.passes.group_experts.routed_loops import read_routed_loops
from glue_compiler.passes.group_experts.row_sets import IDS, SLOT, TOKEN, RowSet
from glue_compiler.passes.group_experts.sorted_loops import read_sorted_loops

_AXES = ((TOKEN,), (TOKEN, SLOT), (SLOT, TOKEN))


def read_loops(graph: ReadGraph) -> Plan:
    """The loops that are one grouped computation."""
    routed, in_order = read_routed_loops(graph), read_sorted_loops(graph)
    return Plan(routed.loops + in_order.loops, routed.alone, routed.skips + in_order.skips)


def read_row_indices(graph: ReadGraph, grouped: Collection[GroupedLoop]) -> list[GroupedLoop]:
    """The row sets that loops look for one by one, and that one sort finds for all.

    What the loops do with their rows is nobody's business here: the sort gives the same indices in the same order.

    Args:
        grouped: loops that are written anyway; their row sets go.
    """
    gone = {node for loop in grouped for node in loop.absorbed}
    families: dict[object, list[RowSet]] = defaultdict(list)
    seen: Counter[object] = Counter()
    for node in graph.nodes:
        rows = graph.sets.row_set(node) if node not in gone else None
        if rows is not None and _is_of_indices(rows, graph.operators):
            key = (graph.operators.number(rows.mask.selected), rows.mask.axes)
            # Two loops over one routing have two row sets for each expert, whose numbers have two names.
            seen[key, rows.expert] += 1
            families[key, seen[key, rows.expert]].append(rows)
    loops = [_row_indices(family, graph) for family in families.values() if len(family) > 1]
    return [loop for loop in loops if loop is not None]


def _is_of_indices(rows: RowSet, operators: Operators) -> bool:
    """``where`` or ``nonzero`` of one expert, in a form whose order is known, and that a piece can stand for."""
    value = value_of(rows.root)
    if rows.mask.axes not in _AXES or rows.mask.any_slot or operators.dtype(rows.mask.selected) not in IDS:
        return False
    if isinstance(value, torch.Tensor):
        return value.dim() == 2 and value.dtype is not torch.bool  # a boolean index is no vector of indices
    items = [user.args[1] if user.target is operator.getitem else None for user in rows.root.users]
    return isinstance(value, tuple | list) and all(type(item) is int for item in items)


def _row_indices(family: list[RowSet], graph: ReadGraph) -> GroupedLoop | None:
    """None if the experts are no range, or what selects the rows changes between the first and the last."""
    in_order = sorted(family, key=lambda rows: rows.expert)
    experts = [rows.expert for rows in in_order]
    if experts[0] < 0 or experts != list(range(experts[0], experts[0] + len(experts))):
        return None
    masks = {node for rows in family for node in rows.mask.nodes}
    roots = graph.in_order([rows.root for rows in family])
    try:
        graph.check_unwritten(masks.union(roots), roots[-1], writers=())
    except LeftAlone:
        return None
    routing = family[0].mask.selected
    selected = graph.operators.operand(routing, roots[0])
    if selected is None:
        return None
    partition = RoutedRows(selected, routing, experts[0], len(experts))
    return GroupedLoop(partition, (), RowIndices(tuple(in_order)), frozenset(masks))
