"""Writes the row sets of several experts as slices of one sorted batch: one host read for all."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.values import value_of
from glue_compiler.passes.group_experts.drafts import Draft, drafted
from glue_compiler.passes.group_experts.grouped_body import Emitter
from glue_compiler.passes.group_experts.row_sets import SLOT, RowSet
from glue_compiler.passes.group_experts.slices import SlicedRows

_aten = torch.ops.aten


def draft_slices(gm: fx.GraphModule, sliced: SlicedRows, analysis: EffectAnalysis) -> Draft:
    """The sort before the first row set, and pieces of it for each. Raises LeftAlone if it cannot be written."""

    def write() -> Callable[[], None]:
        emit = Emitter(gm, (sliced.first,), analysis)
        with gm.graph.inserting_before(sliced.first):
            columns, counts = _sorted_columns(emit, sliced)
            sizes = _sizes(emit, counts, columns[0], sliced)
            pieces = [_split(emit, column, sizes) for column in columns]
        return lambda: _put_in(gm, sliced, pieces)

    return drafted(gm.graph, write)


def _put_in(gm: fx.GraphModule, sliced: SlicedRows, pieces: list[list[fx.Node]]) -> None:
    for rows, *mine in zip(sliced.rows, *pieces, strict=True):
        _replace(gm, rows, mine)
    masks = {node for rows in sliced.rows for node in rows.mask.nodes}
    for node in reversed(gm.graph.nodes):
        if node in masks and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()


def _sorted_columns(emit: Emitter, sliced: SlicedRows) -> tuple[list[fx.Node], fx.Node]:
    """(the indices that the row sets are made of, one vector for each axis; the number of rows of each expert)."""
    selected = sliced.selected
    if sliced.first_expert:
        selected = emit.call(torch.sub, selected, sliced.first_expert)
    k_major = sliced.axes[0] == SLOT
    sort = emit.call(torch.ops.glue.expert_sort.default, selected, sliced.num_experts, k_major)
    order, counts = (emit.call(operator.getitem, sort, i) for i in (0, 2))
    slots = emit.method("to", order, torch.int64)
    if value_of(selected).dim() == 1:
        return [slots], counts
    top_k = _size(emit, selected, 1)
    columns = [
        emit.call(torch.remainder, slots, top_k) if axis == SLOT else emit.call(torch.floor_divide, slots, top_k)
        for axis in sliced.axes
    ]
    return columns, counts


def _sizes(emit: Emitter, counts: fx.Node, column: fx.Node, sliced: SlicedRows) -> list[fx.Node]:
    """The number of rows of each expert, and of none, as numbers: read from the device once."""
    if value_of(counts).device.type != "cpu":
        counts = emit.method("to", counts, "cpu")
    sizes = []
    total = _size(emit, column, 0)
    for expert, rows in enumerate(sliced.rows):
        size = emit.graph.call_method("item", (emit.call(operator.getitem, counts, expert),))
        # The row sets' own number: all that is computed from them is on record with it.
        number = _number_of_rows(rows)
        size.meta.update(emit.meta, example_value=number, unbacked_bindings={number.node.expr: ()})
        sizes.append(size)
    sizes.append(emit.call(operator.sub, total, emit.call(torch.sym_sum, list(sizes))))
    for size in sizes:
        _assert_not_negative(emit, size)
    return sizes


def _size(emit: Emitter, tensor: fx.Node, dim: int) -> Any:
    """An int, or a node of one."""
    size = value_of(tensor).shape[dim]
    return emit.call(_aten.sym_size.int, tensor, dim) if isinstance(size, torch.SymInt) else size


def _assert_not_negative(emit: Emitter, size: fx.Node) -> None:
    """Says to tracing that a number is a size, as Dynamo does."""
    emit.call(_aten._assert_scalar.default, emit.call(operator.ge, size, 0), "an expert has a number of rows")


def _split(emit: Emitter, column: fx.Node, sizes: list[fx.Node]) -> list[fx.Node]:
    """The piece of each expert; the rows of none are left out."""
    pieces = emit.method("split", column, sizes)
    return [emit.call(operator.getitem, pieces, expert) for expert in range(len(sizes) - 1)]


def _number_of_rows(rows: RowSet) -> Any:
    value = value_of(rows.root)
    return (value[0] if isinstance(value, tuple | list) else value).shape[0]


def _replace(gm: fx.GraphModule, rows: RowSet, columns: list[fx.Node]) -> None:
    root = rows.root
    if isinstance(value_of(root), torch.Tensor):
        with gm.graph.inserting_before(root):
            pairs = gm.graph.call_function(torch.stack, (columns, 1))
        pairs.meta.update({key: value for key, value in root.meta.items() if key != "unbacked_bindings"})
        root.replace_all_uses_with(pairs)
    else:
        for user in list(root.users):
            piece = columns[user.args[1]]  # type: ignore[index]
            user.replace_all_uses_with(piece)
            gm.graph.erase_node(user)
    gm.graph.erase_node(root)
