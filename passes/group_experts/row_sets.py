"""Row sets: the (token, slot) pairs that a loop over experts selects for one expert.

Read from data flow alone: a mask is what ``one_hot`` or a comparison with an int makes of the selected experts, through
any views of it; a row set is ``torch.where``/``nonzero`` of such a mask for one expert.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.values import expression, value_of

TOKEN, SLOT, EXPERT, ONE = "token", "slot", "expert", "one"
_AXES_OF_SELECTED = {1: (TOKEN,), 2: (TOKEN, SLOT)}

_ONE_HOT = {torch._C._nn.one_hot, torch.nn.functional.one_hot}
_EQUAL = {torch.eq, operator.eq, "eq", "__eq__"}
_PERMUTE = {torch.permute, "permute"}
_TRANSPOSE = {torch.transpose, "transpose", "swapaxes"}
_SAME_NONZEROS = {"to", "bool", "int", "long", "float", "contiguous", "clone", "detach"}
_WHERE = {torch.where, torch.nonzero, "nonzero"}
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
    nodes: tuple[fx.Node, ...] = ()
    """How the mask was made, first to last."""


@dataclass(frozen=True)
class RowSet:
    """The pairs of one expert, as index vectors: ``where`` gives one for each of ``axes``."""

    where: fx.Node
    mask: Mask

    @property
    def root(self) -> fx.Node:
        return self.where

    @property
    def count(self) -> Any:
        """Sympy expression of the number of pairs."""
        return expression(value_of(self.where)[0].shape[0])

    @property
    def expert(self) -> int:
        assert self.mask.expert is not None
        return self.mask.expert


@dataclass(frozen=True)
class Index:
    """One index vector of a row set: the ``axis`` (token or slot) of each of its rows."""

    rows: RowSet
    axis: str


class RowSets:
    """Recognises masks, row sets and their index vectors; remembers what it has seen. Changes nothing."""

    def __init__(self) -> None:
        self._masks: dict[fx.Node, Mask | None] = {}

    def row_set(self, node: Any) -> RowSet | None:
        """``torch.where(mask)``, ``torch.nonzero(mask, as_tuple=True)`` and the method, for one expert's mask."""
        if not isinstance(node, fx.Node) or not node.op.startswith("call_") or node.target not in _WHERE:
            return None
        if not isinstance(value_of(node), tuple | list) or len(node.args) != 1:
            return None
        mask = self.mask(node.args[0])
        if mask is None or mask.expert is None:
            return None
        return RowSet(node, mask)

    def index(self, node: Any) -> Index | None:
        """An item of a row set."""
        if not isinstance(node, fx.Node) or node.target is not operator.getitem:
            return None
        source, item = node.args
        rows = self.row_set(source)
        if rows is None or not isinstance(item, int) or not 0 <= item < len(rows.mask.axes):
            return None
        axis = rows.mask.axes[item]
        return Index(rows, axis) if axis in (TOKEN, SLOT) else None

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
    if node.target in _TRANSPOSE and len(node.args) == 3 and all(isinstance(dim, int) for dim in node.args[1:]):
        axes = list(mask.axes)
        first, second = node.args[1:]
        axes[first], axes[second] = axes[second], axes[first]  # type: ignore[index]
        return replace(mask, axes=tuple(axes))
    if node.target in ("t", torch.t) or (node.target is _GETATTR and node.args[1] in ("T", "mT")):
        return replace(mask, axes=mask.axes[::-1]) if rank == 2 else None
    if node.target in ("squeeze", torch.squeeze) and len(node.args) == 2 and isinstance(node.args[1], int):
        dim = node.args[1] % rank
        return replace(mask, axes=(*mask.axes[:dim], *mask.axes[dim + 1 :])) if mask.axes[dim] == ONE else None
    if node.target in ("unsqueeze", torch.unsqueeze) and isinstance(node.args[1], int):
        dim = node.args[1] % (rank + 1)
        return replace(mask, axes=(*mask.axes[:dim], ONE, *mask.axes[dim:]))
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
        else:
            return None
    return replace(mask, axes=(*axes, *left), expert=expert)


def _rank(node: fx.Node) -> int:
    value = value_of(node)
    return value.dim() if isinstance(value, torch.Tensor) else -1


def same_size(first: Any, second: Any) -> bool:
    """Equal as written: asks no symbol for its value, so it adds no guard."""
    return bool(expression(first) == expression(second))
