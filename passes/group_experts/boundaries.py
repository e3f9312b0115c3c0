"""Where pieces of a sorted batch begin and end, as sums of the items of an integer vector. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.values import Symbolic, expression, value_of
from glue_compiler.passes.group_experts.copies import Fill, copied_from, fill_of

aten = torch.ops.aten
Item = tuple[Value, int]
"""``vector[index]``."""

_INTEGERS = (torch.int32, torch.int64)
_READS = (aten.item, aten._local_scalar_dense)


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

    def times(self, factor: int) -> Boundary:
        items = frozenset((item, times * factor) for item, times in self.items if factor)
        return Boundary(self.constant * factor, items)

    @property
    def is_constant(self) -> bool:
        return not self.items


class Boundaries:
    """Reads numbers of a graph as boundaries; equal vectors are one vector."""

    def __init__(self, operators: Operators, nodes: Iterable[fx.Node]) -> None:
        self._operators = operators
        self._read_in: dict[Any, fx.Node] = {}
        """Symbol → the node that reads it from a tensor."""
        self._vectors: dict[Any, Value] = {}
        self._known: dict[Any, Boundary | None] = {}
        self._items: dict[Value, list[Boundary] | None] = {}
        for node in nodes:
            symbol = expression(value_of(node)) if isinstance(value_of(node), torch.SymInt) else None
            if isinstance(symbol, sympy.Symbol) and node.op.startswith("call_") and node in operators.numbering.numbers:
                self._read_in.setdefault(symbol, node)

    def of(self, value: Any) -> Boundary | None:
        """An int, a sympy expression, a number's node, or a tensor of one integer; None for what is no sum of items."""
        if type(value) is int or isinstance(value, sympy.Integer):
            return Boundary(int(value))
        if isinstance(value, fx.Node):
            return self._of_node(value)
        if not isinstance(value, Value | sympy.Basic):
            return None
        if value not in self._known:
            self._known[value] = None
            self._known[value] = self._of_tensor(value) if isinstance(value, Value) else self._of_expression(value)
        return self._known[value]

    def _of_node(self, node: fx.Node) -> Boundary | None:
        number = value_of(node)
        if isinstance(number, Symbolic):
            return self.of(expression(number))
        return self.of(self._operators.value(node)) if node.op.startswith("call_") else None

    def _of_expression(self, number: sympy.Basic) -> Boundary | None:
        """A sum of numbers that were read."""
        if isinstance(number, sympy.Symbol):
            return self._of_symbol(number)
        symbols = sorted(number.free_symbols, key=str)
        expanded = sympy.expand(number)
        factors = [expanded.coeff(symbol) for symbol in symbols]
        rest = sympy.expand(expanded - sum(f * s for f, s in zip(factors, symbols, strict=True)))
        total = self.of(rest) if rest.is_Integer else None
        for factor, symbol in zip(factors, symbols, strict=True):
            each = self.of(symbol) if factor.is_Integer else None
            total = total.plus(each.times(int(factor))) if total is not None and each is not None else None
        return total

    def _of_symbol(self, symbol: Any) -> Boundary | None:
        symbol = self._operators.numbering.equal_symbols.get(symbol, symbol)
        node = self._read_in.get(symbol)
        call = self._operators.does(self._operators.value(node)) if node is not None else None
        read = call is not None and call.operator in _READS
        return self.of(call.arguments["self"]) if call is not None and read else None

    def _of_tensor(self, value: Value) -> Boundary | None:
        if not self._operators.is_tensor(value):
            return None
        meta = self._operators.meta(value)
        if meta.rank != 0 or meta.dtype not in _INTEGERS:
            return None
        match self._operators.does(value):
            case Call(aten.add, {"self": first, "other": second, "alpha": 1}):
                return self._sum(first, second, 1)
            case Call(aten.sub, {"self": first, "other": second, "alpha": 1}):
                return self._sum(first, second, -1)
            case Call(aten.select, {"self": vector, "dim": 0 | -1, "index": int(index)}):
                return self._item(vector, index)
            case Call(aten.unbind, {"self": vector, "dim": 0 | -1}):
                return self._item(vector, value.leaf)
        return self.of(copied_from(self._operators, value))

    def _sum(self, first: Any, second: Any, sign: int) -> Boundary | None:
        before, after = self.of(first), self.of(second)
        return before.plus(after, sign) if before is not None and after is not None else None

    # -- vectors

    def _item(self, vector: Any, index: int) -> Boundary | None:
        items = self.items(vector)
        return items[index] if items is not None and -len(items) <= index < len(items) else None

    def items(self, vector: Any) -> list[Boundary] | None:
        """All items of an integer vector of known length, or of a node that is one."""
        if isinstance(vector, fx.Node):
            is_tensor = isinstance(value_of(vector), torch.Tensor) and vector.op.startswith("call_")
            vector = self._operators.value(vector) if is_tensor else None
        if not self._is_vector(vector):
            return None
        if vector not in self._items:
            self._items[vector] = self._items_of(vector)
        return self._items[vector]

    def holds_its_own(self, vector: fx.Node) -> bool:
        """Is a vector of integers made of no other's items?"""
        items = self.items(vector)
        return items is not None and items[:1] == [Boundary(0, frozenset([((self._operators.value(vector), 0), 1)]))]

    def _is_vector(self, value: Any) -> bool:
        if not self._operators.is_tensor(value):
            return False
        meta = self._operators.meta(value)
        return meta.rank == 1 and meta.dtype in _INTEGERS and isinstance(meta.shape[0], int)

    def _items_of(self, vector: Value) -> list[Boundary] | None:
        length = self._operators.meta(vector).shape[0]
        if fill_of(self._operators, vector) is Fill.ZEROS:
            return [Boundary()] * length
        if self._is_vector(source := copied_from(self._operators, vector)):
            return self.items(source)
        match self._operators.does(vector):
            case Call(aten.cumsum, {"self": source, "dim": 0 | -1}) if self._is_vector(source):
                return self._running_sums(source)
            case Call(aten.cat | aten.concat | aten.concatenate, {"tensors": parts, "dim": 0 | -1}):
                return self._joined(parts)
            case Call(aten.pad | aten.constant_pad_nd, {"self": source, "pad": (1, 0)} as given) if (
                given.get("mode", "constant") == "constant" and not given["value"]
            ):
                rest = self.items(source)
                return None if rest is None else [Boundary(), *rest]
        owner = self._vectors.setdefault(self._operators.number(vector), vector)
        return [Boundary(0, frozenset([((owner, i), 1)])) for i in range(length)]

    def _running_sums(self, source: Value) -> list[Boundary] | None:
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
