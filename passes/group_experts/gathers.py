"""Reads how a body takes its rows from a tensor: by token, by token and slot, or by token and expert."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.passes.group_experts.plan import LeftAlone
from glue_compiler.passes.group_experts.row_sets import SLOT, TOKEN, RowSet, RowSets, names_a_token_once

aten = torch.ops.aten
EXPERT_COLUMN, KEPT, NEW = "expert's column", "kept", "new"


@dataclass(frozen=True)
class Gathered:
    """``source`` indexed by the rows of one expert.

    Attributes:
        dims: what becomes of each dimension of ``source``: token, slot, the expert's column, or kept.
        is_leading: new dimensions of size 1, if any, stand before the rows, or else behind everything.
    """

    source: Value
    dims: tuple[str, ...]
    new_dims: int
    is_leading: bool


def gathered(node: fx.Node, rows: Any, sets: RowSets, dependent: Container[fx.Node]) -> Gathered | None:
    """What ``node`` gathers; None if it does not index by tensors what is not ``dependent``. Raises LeftAlone."""
    operators = sets.operators
    value = operators.value(node)
    match operators.does(value):
        case Call(aten.index, {"self": source, "indices": indices}) if isinstance(source, Value):
            pass
        case Call(aten.index_select, {"self": Value() as source, "dim": 0, "index": index}):
            indices = (index,)
        case _:
            return None
    source, dims = _before_views(operators, source, rows.expert)
    if value.node is not node or source.node in dependent:
        return None
    places = [i for i, dim in enumerate(dims) if dim != EXPERT_COLUMN]
    at = 0
    for item in indices:
        found = sets.index(item) if item is not None else None
        if item is not None and (found is None or found.rows.root is not rows.root):
            raise LeftAlone("the body indexes with something else than its rows", node)
        for axis in found.axes if found is not None else (None,):
            if axis is not None and dims[places[at]] != KEPT:
                raise LeftAlone("the body indexes with something else than its rows", node)
            dims[places[at]] = axis or dims[places[at]]
            at += 1
    visible = [dims[place] for place in places]
    leading = next((i for i, dim in enumerate(visible) if dim != NEW), 0)
    inner = visible.count(NEW) - leading
    if inner and (leading or visible[-inner:] != [NEW] * inner):
        raise LeftAlone("the body indexes a tensor in a way that is neither by token nor by token and slot", node)
    old = tuple(dim for dim in dims if dim != NEW)
    return Gathered(source, old, leading + inner, bool(leading))


def _before_views(operators: Operators, value: Value, expert: int) -> tuple[Value, list[str]]:
    """What ``value`` is a view of with dimensions added or one column taken, and what its dimensions are of that.

    A column that is taken stays in the list.
    """
    steps: list[tuple[str, int]] = []
    while (call := operators.does(value)) is not None:
        rank = operators.rank(value)
        if call.operator is aten.unsqueeze:
            steps.append((NEW, call.arguments["dim"] % rank))
        elif call.overload is aten.select.int and call.arguments["index"] == expert and rank == 1:
            if call.arguments["dim"] not in (1, -1):
                break
            steps.append((EXPERT_COLUMN, 1))
        else:
            break
        value = call.arguments["self"]
    dims = [KEPT] * operators.rank(value)
    for what, dim in reversed(steps):
        if what == NEW:
            # Dimensions are counted without the column that was taken, which is the last one.
            dims.insert(dim, NEW)
        else:
            dims[dim] = EXPERT_COLUMN
    return value, dims


def weights_behind_sum(value: Value, rows: Any, sets: RowSets) -> tuple[Value, set[fx.Node]] | None:
    """(``w``, what was looked through), of ``(w * (selected == e)).sum(-1)``: at a row of e, the weight of its slot."""
    operators = sets.operators
    if not isinstance(rows, RowSet):
        return None
    match operators.does(value):
        case Call(aten.sum, {"self": Value() as product, "dim": (1 | -1,), "keepdim": False}):
            pass
        case _:
            return None
    call = operators.does(product)
    if call is None or call.overload is not aten.mul.Tensor or not names_a_token_once(rows, operators):
        return None
    factors = (call.arguments["self"], call.arguments["other"])
    for weights, mask in (factors, factors[::-1]):
        read = sets.mask(mask)
        if read is None or not isinstance(weights, Value) or (read.axes, read.expert) != ((TOKEN, SLOT), rows.expert):
            continue
        same = operators.number(read.selected) == operators.number(rows.mask.selected)
        if same and operators.is_tensor(weights) and operators.dtype(weights) == operators.dtype(value):
            return weights, {value.node, product.node, *read.nodes}
    return None
