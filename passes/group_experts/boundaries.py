"""Where pieces of a sorted batch begin and end, as sums of the items of an integer vector. Changes nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import numpy_capture
from glue_compiler.fx.spellings import ADD, CAT, ZEROS
from glue_compiler.fx.values import value_of

Item = tuple[fx.Node, int]
"""``vector[index]``."""

_INTEGERS = (torch.int32, torch.int64)
_READ = {"item", "__int__", "__index__", int, operator.index}
_COPY = {"cpu", "cuda", "to", "int", "long", "clone", "detach", "contiguous", "tolist", "numpy", "view_as"}
_SUBTRACT = {operator.sub, torch.sub, torch.subtract, "sub", "__sub__"}
_CUMSUM = {torch.cumsum, "cumsum"}
_PAD = {torch._C._nn.pad, torch.nn.functional.pad}


@dataclass(frozen=True)
class Boundary:
    """A constant plus items of vectors, each as often as the number beside it says."""

    constant: int = 0
    items: frozenset[tuple[Item, int]] = frozenset()

    def plus(self, other: Boundary, sign: int = 1) -> Boundary:
        total = dict(self.items)
        for item, times in other.items:
            total[item] = total.get(item, 0) + sign * times
        left = frozenset((item, times) for item, times in total.items() if times)
        return Boundary(self.constant + sign * other.constant, left)

    @property
    def is_constant(self) -> bool:
        return not self.items


class Boundaries:
    """Reads numbers of a graph as boundaries. ``numbers``: value numbers; equal vectors are one vector."""

    def __init__(self, numbers: dict[fx.Node, int]) -> None:
        self._numbers = numbers
        self._vectors: dict[int, fx.Node] = {}
        self._known: dict[fx.Node, Boundary | None] = {}
        self._items: dict[fx.Node, list[Boundary] | None] = {}

    def of(self, value: Any) -> Boundary | None:
        """An int, or a node that is one or a tensor of one integer; None for what is no sum of vectors' items."""
        if type(value) is int:
            return Boundary(value)
        if not isinstance(value, fx.Node) or not value.op.startswith("call_"):
            return None
        if value not in self._known:
            self._known[value] = self._sum(value)
        return self._known[value]

    def _sum(self, node: fx.Node) -> Boundary | None:
        value = value_of(node)
        if isinstance(value, torch.Tensor) and (value.dim() != 0 or value.dtype not in _INTEGERS):
            return None
        numpy_name = numpy_capture.numpy_function(node.target)
        target = numpy_name or node.target
        if node.target is operator.getitem:
            return self._item(*node.args)
        if node.kwargs:
            return None
        if target in _READ or (target in _COPY and len(node.args) <= 2):
            return self.of(node.args[0])
        if target in (operator.iadd, "iadd") and not isinstance(value, torch.Tensor):
            target = "add"
        if (target in ADD or target in _SUBTRACT) and len(node.args) == 2:
            first, second = (self.of(arg) for arg in node.args)
            if first is None or second is None:
                return None
            return first.plus(second, 1 if target in ADD else -1)
        if target is torch.sym_sum:
            return self._total(node.args[0])
        return None

    def _total(self, values: Any) -> Boundary | None:
        total: Boundary | None = Boundary()
        for value in values if isinstance(values, tuple | list) else [values]:
            each = self.of(value)
            total = total.plus(each) if total is not None and each is not None else None
        return total

    # -- vectors

    def _item(self, vector: Any, index: Any) -> Boundary | None:
        if not isinstance(vector, fx.Node) or type(index) is not int:
            return None
        if vector.target in ("unbind", torch.unbind) and vector.args[1:] in ((), (0,)) and not vector.kwargs:
            vector = vector.args[0]
        items = self.items(vector)
        return items[index] if items is not None and -len(items) <= index < len(items) else None

    def items(self, vector: Any) -> list[Boundary] | None:
        """All items of an integer vector of known length."""
        if not isinstance(vector, fx.Node):
            return None
        if vector not in self._items:
            self._items[vector] = self._items_of(vector) if _is_vector(vector) else None
        return self._items[vector]

    def _items_of(self, vector: fx.Node) -> list[Boundary] | None:
        length = value_of(vector).shape[0]
        source = vector.args[0] if vector.args else None
        if vector.op.startswith("call_"):
            if vector.target in _COPY and _is_vector(source):
                return self.items(source)
            if vector.target in ZEROS:
                return None if _is_written(vector) else [Boundary()] * length
            if vector.target in _CUMSUM and _is_vector(source) and _dim(vector) in (0, -1):
                return self._running_sums(source)
            if vector.target in CAT and isinstance(source, tuple | list) and _dim(vector, 0) in (0, -1):
                return self._joined(source)
            if vector.target in _PAD and vector.args[1:] in (((1, 0),), ([1, 0],)) and not vector.kwargs:
                rest = self.items(source)
                return None if rest is None else [Boundary(), *rest]
        number = self._numbers.get(vector)
        owner = vector if number is None else self._vectors.setdefault(number, vector)
        return [Boundary(0, frozenset([((owner, i), 1)])) for i in range(length)]

    def _running_sums(self, source: Any) -> list[Boundary] | None:
        items = self.items(source)
        if items is None:
            return None
        sums: list[Boundary] = []
        for item in items:
            sums.append(sums[-1].plus(item) if sums else item)
        return sums

    def _joined(self, parts: Iterable[Any]) -> list[Boundary] | None:
        joined: list[Boundary] = []
        for part in parts:
            items = self.items(part)
            if items is None:
                return None
            joined += items
        return joined


def copied_from(node: fx.Node) -> fx.Node | None:
    """The integer or floating vector that a cast or a copy of one was made from."""
    source = node.args[0] if node.args else None
    return source if node.target in _COPY and isinstance(source, fx.Node) and _is_tensor(source) else None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _is_vector(node: Any) -> bool:
    value = value_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in _INTEGERS:
        return False
    return isinstance(value.shape[0], int)


def _is_written(node: fx.Node) -> bool:
    """May zeros have become something else? A vector that only ``cat`` takes stays."""
    return any(user.target not in CAT for user in node.users)


def _dim(node: fx.Node, default: Any = None) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", default)
