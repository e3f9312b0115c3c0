"""Row sets: the (token, slot) pairs that a loop over experts selects for one expert.

Read from data flow alone: a mask is what ``one_hot`` or a comparison with an int makes of the selected experts, through
any views of it; a row set is ``torch.where``/``nonzero`` of such a mask for one expert.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import equal_sizes
from glue_compiler.fx.effects import Effects
from glue_compiler.fx.spellings import ANY, SUM, TRANSPOSE
from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.group_experts.selected_experts import are_distinct

TOKEN, SLOT, EXPERT, ONE = "token", "slot", "expert", "one"
_AXES_OF_SELECTED = {1: (TOKEN,), 2: (TOKEN, SLOT)}

_ONE_HOT = {torch._C._nn.one_hot, torch.nn.functional.one_hot}
_EQUAL = {torch.eq, operator.eq, "eq", "__eq__"}
_PERMUTE = {torch.permute, "permute"}
_SAME_NONZEROS = {"to", "bool", "int", "long", "float", "contiguous", "clone", "detach"}
_WHERE = {torch.where, torch.nonzero, "nonzero"}
_FLATTEN = {"squeeze", torch.squeeze, "flatten", torch.flatten, "view", "reshape"}
COUNT_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
"""They hold every number of rows that a batch can have."""
_GETATTR = getattr


@dataclass(frozen=True)
class Mask:
    """Nonzero at (token, slot) where ``selected == expert``; ``axes`` says what each dimension of the node is.

    While ``EXPERT`` is among the axes, ``expert`` is None. ``classes``: ids are known to lie in ``[0, classes)``.
    """

    selected: fx.Node
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


@dataclass(frozen=True)
class Index:
    """What indexes with a row set: the axes (token or slot) that it indexes, of each of its rows."""

    rows: RowSet
    axes: tuple[str, ...]


class RowSets:
    """Recognises masks, row sets and their index vectors; remembers what it has seen. Changes nothing."""

    def __init__(self) -> None:
        self._masks: dict[fx.Node, Mask | None] = {}

    def row_set(self, node: Any) -> RowSet | None:
        """``nonzero`` of one expert's mask in any of its forms, or the mask itself where something indexes with it."""
        if not isinstance(node, fx.Node) or not node.op.startswith("call_"):
            return None
        if node.target not in _WHERE:
            return self._boolean_index(node)
        mask = self.mask(node.args[0]) if len(node.args) == 1 else None
        if mask is None or mask.expert is None:
            return None
        value = value_of(node)
        found = value[0] if isinstance(value, tuple | list) else value
        return RowSet(node, mask, expression(found.shape[0]))

    def _boolean_index(self, node: fx.Node) -> RowSet | None:
        mask = self.mask(node)
        if mask is None or mask.expert is None or mask.axes not in ((TOKEN,), (TOKEN, SLOT)):
            return None
        if value_of(node).dtype is not torch.bool:
            return None
        for user in node.users:
            if user.target is operator.getitem and user.args[0] is not node:
                items = user.args[1] if isinstance(user.args[1], tuple | list) else (user.args[1],)
                # As many dimensions as stand before the mask stand before the rows.
                before = sum(item is None for item in items[: items.index(node)]) if node in items else 0
                return RowSet(node, mask, expression(value_of(user).shape[before]))
        return None

    def index(self, node: Any) -> Index | None:
        """An index vector of a row set, or a boolean index."""
        if not isinstance(node, fx.Node) or not node.op.startswith("call_"):
            return None
        boolean = self.row_set(node)
        if boolean is not None:
            return Index(boolean, boolean.mask.axes) if node.target not in _WHERE else None
        source, column = node, None
        if node.target is operator.getitem:
            source, column = node.args  # type: ignore[assignment]
        elif (node.target in _FLATTEN and node.args[1:] == (-1,)) or (node.target == "flatten" and not node.args[1:]):
            source, column = node.args[0], "only"  # type: ignore[assignment]
        rows = self.row_set(source)
        if rows is None or source.target not in _WHERE:
            return None
        if not isinstance(value_of(source), tuple | list):  # [rows, axes]
            if isinstance(column, tuple) and len(column) == 2 and column[0] in (slice(None), Ellipsis):
                column = column[1]
            elif column == "only" and len(rows.mask.axes) == 1:
                column = 0
            else:
                return None
        if type(column) is not int or not -len(rows.mask.axes) <= column < len(rows.mask.axes):
            return None
        axis = rows.mask.axes[column]
        return Index(rows, (axis,)) if axis in (TOKEN, SLOT) else None

    def mask(self, node: Any) -> Mask | None:
        if not isinstance(node, fx.Node) or not node.op.startswith("call_"):
            return None
        if node not in self._masks:
            self._masks[node] = None  # a cycle cannot be, and a failure is remembered
            found = self._mask(node)
            if found is not None and len(found.axes) == _rank(node):
                self._masks[node] = replace(found, nodes=(*found.nodes, node))
        return self._masks[node]

    def _mask(self, node: fx.Node) -> Mask | None:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        if node.target in _ONE_HOT:
            classes = node.args[1] if len(node.args) > 1 else node.kwargs.get("num_classes")
            axes = _AXES_OF_SELECTED.get(_rank(source))
            if axes is None or not isinstance(classes, int) or classes < 1:
                return None
            return Mask(source, (*axes, EXPERT), classes=classes)
        if node.target in _EQUAL and len(node.args) == 2 and type(node.args[1]) is int:
            axes = _AXES_OF_SELECTED.get(_rank(source))
            value = value_of(source)
            if axes is None or not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
                return None
            return Mask(source, axes, node.args[1])
        mask = self.mask(source)
        return None if mask is None else _view(mask, node)


def _view(mask: Mask, node: fx.Node) -> Mask | None:
    """What ``node`` makes of the mask that is its first argument."""
    rank = len(mask.axes)
    if node.op == "call_method" and node.target in _SAME_NONZEROS:
        return mask
    if node.target in _PERMUTE:
        dims = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
        if len(dims) != rank or not all(isinstance(dim, int) for dim in dims):
            return None
        return replace(mask, axes=tuple(mask.axes[dim] for dim in dims))  # type: ignore[index]
    if node.target in TRANSPOSE and len(node.args) == 3 and all(isinstance(dim, int) for dim in node.args[1:]):
        axes = list(mask.axes)
        first, second = node.args[1:]
        axes[first], axes[second] = axes[second], axes[first]  # type: ignore[index]
        return replace(mask, axes=tuple(axes))
    if node.target in ("t", torch.t) or (node.target is _GETATTR and node.args[1] in ("T", "mT")):
        return replace(mask, axes=mask.axes[::-1]) if rank == 2 else None
    if node.target in ("squeeze", torch.squeeze) and len(node.args) == 2 and isinstance(node.args[1], int):
        dim = node.args[1] % rank
        if mask.axes[dim] == ONE:
            return replace(mask, axes=(*mask.axes[:dim], *mask.axes[dim + 1 :]))
        return mask if _rank(node) == rank else None
    if node.target in ("unsqueeze", torch.unsqueeze) and isinstance(node.args[1], int):
        dim = node.args[1] % (rank + 1)
        return replace(mask, axes=(*mask.axes[:dim], ONE, *mask.axes[dim:]))
    if node.target in ANY and mask.axes == (TOKEN, SLOT):
        along = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim")
        return replace(mask, axes=(TOKEN,), any_slot=True) if along in (1, -1) and len(node.kwargs) < 2 else None
    if node.target is operator.getitem:
        return _subscript(mask, node.args[1])
    if node.target in ("select", torch.select) and len(node.args) == 3 and isinstance(node.args[1], int):
        return _subscript(mask, (*[slice(None)] * (node.args[1] % rank), node.args[2]))
    return None


def _subscript(mask: Mask, index: Any) -> Mask | None:
    items = list(index) if isinstance(index, tuple | list) else [index]
    if items.count(Ellipsis) > 1:
        return None
    if Ellipsis in items:
        at = items.index(Ellipsis)
        given = sum(item is not None for item in items) - 1
        items[at : at + 1] = [slice(None)] * (len(mask.axes) - given)
    axes: list[str] = []
    left = list(mask.axes)
    expert = mask.expert
    for item in items:
        if item is None:
            axes.append(ONE)
        elif not left:
            return None
        elif item == slice(None):
            axes.append(left.pop(0))
        elif type(item) is int and left[0] == EXPERT:
            # A negative index counts from the last class.
            expert = item if item >= 0 else (mask.classes or 0) + item
            left.pop(0)
        elif type(item) is int and left[0] == ONE:
            left.pop(0)
        elif left[0] == EXPERT and expert is None and _selects_one(item):
            expert = item.start
            axes.append(ONE)
            left.pop(0)
        else:
            return None
    return replace(mask, axes=(*axes, *left), expert=expert)


def _selects_one(item: Any) -> bool:
    """``slice(e, e + 1)``, which also stands for ``tensor([e])``."""
    return isinstance(item, slice) and type(item.start) is int and item.start >= 0 and item.stop == item.start + 1


def names_a_token_once(rows: RowSet, effects: Mapping[fx.Node, Effects]) -> bool:
    """Is no token twice in the row set?"""
    return rows.mask.any_slot or are_distinct(rows.mask.selected, effects)


def counts_by_expert(total: fx.Node, sets: RowSets) -> Mask | None:
    """The mask, if ``total`` is its sum over all but the experts: the number of rows of each expert.

    In a dtype that holds such a number: bf16 rounds from 257 rows on.
    """
    counted = total.args[0] if total.target in SUM and total.args else None
    mask = sets.mask(counted)
    dims = total.args[1] if len(total.args) > 1 else total.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if mask is None or mask.expert is not None or not isinstance(dims, tuple | list):
        return None
    summed = {dim % len(mask.axes) for dim in dims if isinstance(dim, int)}
    kept = [axis for i, axis in enumerate(mask.axes) if i not in summed]
    value = value_of(total)
    return mask if kept == [EXPERT] and value.dim() == 1 and value.dtype in COUNT_DTYPES else None


def _rank(node: fx.Node) -> int:
    value = value_of(node)
    return value.dim() if isinstance(value, torch.Tensor) else -1


def same_size(first: Any, second: Any) -> bool:
    """Equal as written: asks no symbol for its value, so it adds no guard."""
    return bool(expression(first) == expression(second))


def as_many_rows(first: Any, second: Any) -> bool:
    """Equal as written, or equal sizes of two inputs: then the graph is compiled for equal ones only."""
    return same_size(first, second) or equal_sizes.equal_by_guard(first, second)
