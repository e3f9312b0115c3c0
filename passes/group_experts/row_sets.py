"""Row sets: the (token, slot) pairs that a loop over experts selects for one expert.

Read from data flow alone: a mask is what ``one_hot`` or a comparison with an int makes of the selected experts, through
any views of it; a row set is ``torch.where``/``nonzero`` of such a mask for one expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import equal_sizes
from glue_compiler.fx.operators import FOUND, Call, Operators, Value
from glue_compiler.fx.values import expression
from glue_compiler.passes.group_experts.copies import COPIES, SAME_ELEMENTS

aten = torch.ops.aten
TOKEN, SLOT, EXPERT, ONE = "token", "slot", "expert", "one"
_AXES_OF_SELECTED = {1: (TOKEN,), 2: (TOKEN, SLOT)}
IDS = (torch.int32, torch.int64)
"""Narrower ones overflow where experts are counted from another one than zero."""

_WHERE = {aten.where.default, aten.nonzero.default, aten.nonzero_numpy.default}
_SWAPS = {aten.transpose: ("dim0", "dim1"), aten.swapaxes: ("axis0", "axis1"), aten.swapdims: ("dim0", "dim1")}
_REVERSES = {aten.t, aten.numpy_T, aten.mT, aten.adjoint}


@dataclass(frozen=True)
class Mask:
    """Nonzero at (token, slot) where ``selected == expert``; ``axes`` says what each dimension is.

    While ``EXPERT`` is among the axes, ``expert`` is None. ``classes``: ids are known to lie in ``[0, classes)``.
    """

    selected: Value
    axes: tuple[str, ...]
    expert: int | None = None
    classes: int | None = None
    any_slot: bool = False
    """True at a token if any of its slots selects the expert: the slots are no dimension any more."""
    nodes: tuple[fx.Node, ...] = ()
    """How the mask was made, first to last."""


@dataclass(frozen=True)
class RowSet:
    """The pairs of one expert. ``root`` makes index vectors of them (``where``), or is a boolean index itself."""

    root: fx.Node
    mask: Mask
    count: Any
    """Sympy expression of the number of pairs."""

    @property
    def expert(self) -> int:
        assert self.mask.expert is not None
        return self.mask.expert

    @property
    def entries(self) -> tuple[fx.Node, ...]:
        """Where the rows come into the expert's body."""
        return (self.root,)


@dataclass(frozen=True)
class Index:
    """What indexes with a row set: the axes (token or slot) that it indexes, of each of its rows."""

    rows: RowSet
    axes: tuple[str, ...]
    is_boolean: bool = False


class RowSets:
    """Recognises masks, row sets and their index vectors; remembers what it has seen. Changes nothing.

    ``written``: nodes that were masks before something wrote them.
    """

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self.written: set[fx.Node] = set()
        self._masks: dict[Value, Mask | None] = {}
        self._row_sets: dict[Value, RowSet | None] = {}

    def row_set(self, node: fx.Node) -> RowSet | None:
        """``nonzero`` of one expert's mask in any of its forms, or the mask itself where something indexes with it."""
        if not node.op.startswith("call_"):
            return None
        value = self.operators.value(node)
        return self._row_set(value) if value.node is node and value.leaf == 0 else None

    def _row_set(self, value: Value) -> RowSet | None:
        """Of the first result of a ``where``, or a boolean mask."""
        if value not in self._row_sets:
            self._row_sets[value] = self._found(value)
        return self._row_sets[value]

    def _found(self, value: Value) -> RowSet | None:
        call = self.operators.does(value)
        if call is None or call.overload not in _WHERE:
            return self._boolean_index(value)
        mask = self.mask(call.arguments["condition" if call.overload is aten.where.default else "self"])
        if mask is None or mask.expert is None:
            return None
        return RowSet(value.node, mask, self.operators.meta(value).shape[0])

    def _boolean_index(self, value: Value) -> RowSet | None:
        mask = self.mask(value)
        if mask is None or mask.expert is None or mask.axes not in ((TOKEN,), (TOKEN, SLOT)):
            return None
        if self.operators.meta(value).dtype is not torch.bool:
            return None
        for user in value.node.users:
            for step, call in enumerate(self.operators.calls(user) or ()):
                if call.overload is aten.index.Tensor and value in call.arguments["indices"]:
                    # As many dimensions as stand before the mask stand before the rows.
                    before = call.arguments["indices"].index(value)
                    if all(item is None for item in call.arguments["indices"][:before]):
                        return RowSet(value.node, mask, self.operators.meta(Value(user, step)).shape[before])
        return None

    def index(self, value: Any) -> Index | None:
        """An index vector of a row set, or a boolean index."""
        if not isinstance(value, Value) or not self.operators.is_tensor(value):
            return None
        call = self.operators.does(value)
        if call is None:
            return None
        if call.overload in (aten.where.default, aten.nonzero_numpy.default):
            return self._column(Value(value.node, value.step, 0), value.leaf)
        if call.overload is aten.select.int and self._is_of_pairs(call):
            return self._column(call.arguments["self"], call.arguments["index"])
        if call.overload is aten.unbind.int and self._is_of_pairs(call):
            return self._column(call.arguments["self"], value.leaf)
        source: Any = call.arguments.get("self")
        if (call.overload in SAME_ELEMENTS or call.operator is aten.squeeze) and self._is_pairs(source):
            only = self.operators.meta(value).rank == 1 and self._column(source, 0)
            return only if only and len(only.rows.mask.axes) == 1 else None
        boolean = self._row_set(value)
        return Index(boolean, boolean.mask.axes, is_boolean=True) if boolean is not None else None

    def _is_of_pairs(self, call: Call) -> bool:
        return call.arguments["dim"] in (1, -1) and self._is_pairs(call.arguments["self"])

    def _is_pairs(self, value: Any) -> bool:
        """``nonzero``, ``[rows, axes]``."""
        call = self.operators.does(value) if isinstance(value, Value) else None
        return call is not None and call.overload is aten.nonzero.default

    def _column(self, pairs: Value, column: Any) -> Index | None:
        rows = self._row_set(pairs)
        if rows is None or type(column) is not int or not -len(rows.mask.axes) <= column < len(rows.mask.axes):
            return None
        axis = rows.mask.axes[column]
        return Index(rows, (axis,)) if axis in (TOKEN, SLOT) else None

    def mask(self, value: Any) -> Mask | None:
        if not isinstance(value, Value) or not self.operators.is_tensor(value):
            return None
        if value not in self._masks:
            self._masks[value] = None  # a cycle cannot be, and a failure is remembered
            found = self._mask(value)
            if found is not None and len(found.axes) == self.operators.meta(value).rank:
                nodes = dict.fromkeys((*found.nodes, value.node))
                self._masks[value] = replace(found, nodes=tuple(nodes))
        return self._masks[value]

    def _mask(self, value: Value) -> Mask | None:
        if value.step == FOUND and self.mask(self.operators.value(value.node)) is not None:
            self.written.add(value.node)
        match self.operators.does(value):
            case Call(aten.one_hot, {"self": Value() as selected, "num_classes": int(classes)}) if classes >= 1:
                axes = _AXES_OF_SELECTED.get(self.operators.meta(selected).rank)
                return Mask(selected, (*axes, EXPERT), classes=classes) if axes is not None else None
            case Call(aten.eq, {"self": Value() as selected, "other": expert}) if type(expert) is int:
                meta = self.operators.meta(selected)
                axes = _AXES_OF_SELECTED.get(meta.rank)
                return Mask(selected, axes, expert) if axes is not None and meta.dtype in IDS else None
            case Call(_, {"self": Value() as source}) as call:
                mask = self.mask(source)
                return None if mask is None else self._view(mask, call, value)
        return None

    def _view(self, mask: Mask, call: Call, value: Value) -> Mask | None:
        """What ``call`` makes of the mask that is its operand."""
        axes, rank, given = mask.axes, len(mask.axes), call.arguments
        dim: Any = given.get("dim")
        if call.operator in COPIES:
            return mask
        if call.operator is aten.permute:
            return replace(mask, axes=tuple(axes[each] for each in given["dims"]))
        if call.operator in _SWAPS:
            first, second = (given[name] % rank for name in _SWAPS[call.operator])
            swapped = {first: axes[second], second: axes[first]}
            return replace(mask, axes=tuple(swapped.get(i, axis) for i, axis in enumerate(axes)))
        if call.operator in _REVERSES:
            return replace(mask, axes=axes[::-1]) if rank == 2 else None
        if call.overload is aten.squeeze.dim:
            if axes[dim % rank] == ONE:
                return replace(mask, axes=_without(axes, dim % rank))
            return mask if self.operators.meta(value).rank == rank else None
        if call.operator is aten.unsqueeze:
            at = dim % (rank + 1)
            return replace(mask, axes=(*axes[:at], ONE, *axes[at:]))
        if call.overload is aten.any.dim and axes == (TOKEN, SLOT) and dim in (1, -1) and not given["keepdim"]:
            return replace(mask, axes=(TOKEN,), any_slot=True)
        if call.overload is aten.select.int:
            return _selected(mask, dim % rank, given["index"])
        if call.overload is aten.slice.Tensor:
            return self._sliced(mask, dim % rank, call)
        return None

    def _sliced(self, mask: Mask, dim: int, call: Call) -> Mask | None:
        """``[e : e + 1]`` of the experts, which also stands for ``tensor([e])``; and a slice of everything."""
        start, end = call.arguments["start"], call.arguments["end"]
        size = self.operators.meta(call.arguments["self"]).shape[dim]
        if call.arguments["step"] != 1 or type(start or 0) is not int or type(end) not in (int, type(None)):
            return None
        if not start and (end is None or (type(size) is int and end >= size) or end >= torch.iinfo(torch.int64).max):
            return mask
        one = mask.axes[dim] == EXPERT and mask.expert is None and start is not None and start >= 0 and end == start + 1
        if not one or start >= (mask.classes or 0):
            return None
        return replace(mask, axes=(*mask.axes[:dim], ONE, *mask.axes[dim + 1 :]), expert=start)


def _selected(mask: Mask, dim: int, index: Any) -> Mask | None:
    if type(index) is not int:
        return None
    if mask.axes[dim] == ONE:
        return replace(mask, axes=_without(mask.axes, dim))
    if mask.axes[dim] != EXPERT or mask.classes is None:
        return None
    # A negative index counts from the last class.
    return replace(mask, axes=_without(mask.axes, dim), expert=index if index >= 0 else mask.classes + index)


def _without(axes: tuple[str, ...], dim: int) -> tuple[str, ...]:
    return (*axes[:dim], *axes[dim + 1 :])


def names_a_token_once(rows: RowSet, operators: Operators) -> bool:
    """Is no token twice in the row set?"""
    return rows.mask.any_slot or are_distinct(operators, rows.mask.selected)


def are_distinct(operators: Operators, selected: Value) -> bool:
    """Does each row of ``selected``, ``[tokens, slots]`` or ``[tokens]``, name an expert at most once?

    It does if there is one slot, or if the rows are those of the indices of ``topk`` along its last dimension.
    """
    shape = operators.meta(selected).shape
    if len(shape) == 1 or is_known(shape[-1], 1):
        return True
    value: Any = selected
    while isinstance(value, Value) and _has_rows_of(operators, value, shape):
        call = operators.does(value)
        if call is None:
            return False
        if call.operator is torch.ops.aten.topk:
            rank = operators.meta(value).rank
            return value.leaf == 1 and call.arguments["dim"] in (-1, rank - 1)
        if call.operator not in COPIES and call.overload not in SAME_ELEMENTS:
            return False
        value = call.arguments["self"]
    return False


def _has_rows_of(operators: Operators, value: Value, shape: tuple[Any, ...]) -> bool:
    """Rows of the same length, in a dtype that holds every index: then it has the same rows."""
    meta = operators.meta(value)
    if meta.dtype not in IDS or not meta.shape:
        return False
    return isinstance(shape[-1], int) and is_known(meta.shape[-1], shape[-1])


def is_known(size: Any, wanted: int) -> bool:
    """Is a size that number, for every batch?"""
    return type(size) is int and size == wanted


def same_size(first: Any, second: Any) -> bool:
    """Equal as written: asks no symbol for its value, so it adds no guard."""
    return bool(expression(first) == expression(second))


def as_many_rows(first: Any, second: Any) -> bool:
    """Equal as written, or equal sizes of two inputs: then the graph is compiled for equal ones only."""
    return same_size(first, second) or equal_sizes.equal_by_guard(first, second)
