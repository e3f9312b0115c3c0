"""Finds rows that are taken from tokens in the order of a sort, and those that are put back and added up by token.

``rows[i] = tokens[order[i] // k]``, and ``sum over j of rows[inverse[t * k + j]]``, where ``order`` is an arrangement
of all numbers below its length and ``inverse`` undoes it. Backward of an index adds with atomics, or sorts; here each
token knows its rows, since ``order`` names each slot once. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import Tensor, fx

from glue_compiler.fx.index_expressions import IndexReader, Unreadable
from glue_compiler.fx.index_operators import INDEX_DTYPES
from glue_compiler.fx.operators import UNTRACKED, Call, Operators, Value
from glue_compiler.fx.values import expression, requires_grad, storages_of, value_of, values_of
from glue_compiler.ops.kernel_support import runs_triton
from glue_compiler.passes.group_experts.copies import copied_from

aten = torch.ops.aten
_ROW = sympy.Symbol("row", integer=True, nonnegative=True)


@dataclass(frozen=True)
class TakenRows:
    """``node`` is ``tokens[order // top_k]``: floating ``[T * top_k, width]``."""

    node: fx.Node
    order: fx.Node
    top_k: int
    tokens: fx.Node


@dataclass(frozen=True)
class SummedRows:
    """``node`` is ``[T, width]``: of each token the sum of its ``top_k`` rows, times the weights ``[T * top_k]`` of its
    slots, if there are some."""

    node: fx.Node
    order: fx.Node
    top_k: int
    rows: fx.Node
    weights: fx.Node | None


_NARROWEST = 64
"""Columns from which on a program of a kernel has enough to do for each token."""


def pays(rows: Tensor) -> bool:
    """Is this a device on which backward would add ``rows`` with atomics? By what is known of fakes."""
    width = rows.shape[1]
    return rows.is_cuda and runs_triton(rows) and isinstance(width, int) and width >= _NARROWEST


def may_take_rows(node: fx.Node) -> bool:
    """Cheaper to ask than what a call does, and few are left: rows of floating numbers by one vector of integers."""
    value, operands = value_of(node), values_of(node.all_input_nodes)
    return (
        _is_matrix(value)
        and requires_grad(value)
        and any(_is_vector(operand) for operand in operands)
        and any(_is_matrix(operand) for operand in operands)
        and pays(value)
    )


def sort_of(operators: Operators, value: Value) -> Call | None:
    """The operator that sorts, if ``value`` is the places that it gives."""
    return operators.does(value, aten.sort) if value.leaf == 1 else None


class PermutedRows:
    """Reads one graph."""

    def __init__(self, gm: fx.GraphModule, operators: Operators) -> None:
        self.gm = gm
        self.operators = operators
        self.reader = IndexReader(operators)

    def taken(self) -> Iterator[TakenRows]:
        for node in self.gm.graph.nodes:
            if may_take_rows(node) and (found := self._taken(node)) is not None:
                yield found

    def summed(self, taken: Sequence[TakenRows]) -> Iterator[SummedRows]:
        """The sums of rows in the orders of ``taken``."""
        known = {(self._number_of(each.order), each.top_k): each for each in taken}
        for node in self.gm.graph.nodes if known else ():
            value = value_of(node)
            if _is_matrix(value) and requires_grad(value) and self.operators.dispatches(node, {aten.sum}):
                found = self._summed(node, known)
                if found is not None:
                    yield found

    def idle_masks(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """(node, operand) of each ``masked_fill`` by a mask that holds nowhere, of rows of floating numbers."""
        for node in self.gm.graph.nodes:
            if not _is_matrix(value_of(node)) or not self.operators.dispatches(node, {aten.where}):
                continue
            call, source = self._does(self.operators.value(node)), self.operators.passed_as(node, "self")
            if call is None or source is None or value_of(source).shape != value_of(node).shape:
                continue
            if isinstance(call.arguments["self"], Value):  # which may have a gradient
                continue
            if self._never_holds(call.arguments["condition"]) and self._may_stand_for(source, node, call):
                yield node, source

    def _does(self, value: Value) -> Call | None:
        """The operator that makes ``value``, if gradients pass through it as through what would be written."""
        call = self.operators.does(value)
        cuts = call is not None and call.operator is aten.detach
        return call if not cuts and self.operators.passes_gradients(value.node) else None

    # -- what is taken

    def _taken(self, node: fx.Node) -> TakenRows | None:
        source, row = self._source_row(self.operators.value(node))
        if source is None:
            return None
        tokens = self._operand(source, node)
        found = [each for each in row.atoms(AppliedUndef) if each.args == (_ROW,)]
        order = self._order(self.reader.leaves.get(found[0].func.__name__)) if len(found) == 1 else None
        if tokens is None or order is None or not _is_matrix(value_of(tokens)):
            return None
        slots, count = self.operators.shape(order)[0], self.operators.shape(source)[0]
        if expression(value_of(node).shape[0]) != slots:  # a part of the order may leave slots out
            return None
        top_k = sympy.cancel(sympy.sympify(slots) / count) if count != 0 else sympy.S.Zero
        order_node = self._operand(order, node)
        if not isinstance(top_k, sympy.Integer) or top_k < 1 or row != sympy.floor(found[0] / top_k):
            return None
        return TakenRows(node, order_node, int(top_k), tokens) if order_node is not None else None

    def _operand(self, value: Value, at: fx.Node) -> fx.Node | None:
        """A node of this graph in which ``at`` finds ``value``."""
        node = self.operators.operand(value, at)
        return node if node is not None and node.graph is at.graph else None

    def _source_row(self, value: Value) -> tuple[Value | None, Any]:
        """(``x``, ``f(row)``) where ``value[row]`` is ``x[f(row)]``, through all that is indexed by one vector."""
        row: Any = _ROW
        source: Value | None = None
        while (found := self._indexed(value)) is not None:
            value, index = found
            source = value
            row = self._element(index, row)
            if row is None:
                return None, None
        return source, row

    def _indexed(self, value: Value) -> tuple[Value, Value] | None:
        """(``x``, ``i``) of ``x[i]``, ``i`` one vector of integers."""
        match self._does(value):
            case Call(aten.index, {"self": Value() as source, "indices": (Value() as index,)}):
                pass
            case Call(aten.index_select, {"self": Value() as source, "dim": 0, "index": Value() as index}):
                pass
            case _:
                return None
        is_known = self.operators.is_tensor(source) and self.operators.is_tensor(index)
        meta = self.operators.meta(index) if is_known else None
        return (source, index) if meta is not None and meta.rank == 1 and meta.dtype in INDEX_DTYPES else None

    def _element(self, index: Value, at: Any) -> Any:
        """Element ``at`` of a vector of integers; None if nothing is known of it."""
        inner = self._indexed(index)
        if inner is not None:
            at = self._element(inner[1], at)
            return None if at is None else self._element(inner[0], at)
        try:
            return self.reader.read(index, (at,))
        except Unreadable:
            return None

    def _order(self, value: Value | None) -> Value | None:
        """``value``, if it holds each number below its length once: the places of a sort."""
        return value if value is not None and sort_of(self.operators, value) is not None else None

    # -- what is added up

    def _summed(self, node: fx.Node, known: Mapping[Any, TakenRows]) -> SummedRows | None:
        operators = self.operators
        match self._does(operators.value(node)):
            case Call(aten.sum, {"self": Value() as by_token, "dim": (1 | -2,), "keepdim": False}):
                pass
            case _:
                return None
        by_slot = self._behind(self._widened(by_token))
        found = self._indexed(self._widened(by_slot)) if by_slot is not None else None
        order = self._undone(found[1]) if found is not None else None
        if by_slot is None or found is None or order is None:
            return None
        shapes = [operators.shape(value) for value in (by_token, by_slot, found[0])]
        if len(shapes[0]) != 3 or len(shapes[1]) != 2 or shapes[0][2] != shapes[1][1] or shapes[2] != shapes[1]:
            return None
        taken = known.get((operators.number(order), shapes[0][1]))
        if taken is None or shapes[1][0] != operators.shape(order)[0]:
            return None
        rows, weights = self._weighted(found[0], order)
        given = [self._operand(each, node) for each in (rows, *([weights] if weights is not None else []))]
        if any(each is None or not value_of(each).is_floating_point() for each in given):
            return None
        dtypes = [value_of(each).dtype for each in given if each is not None]
        work, out = torch.promote_types(dtypes[0], torch.float32), value_of(node).dtype
        # It would add up, or pass gradients on, in narrower numbers.
        if torch.promote_types(work, out) != work or any(torch.promote_types(each, out) != out for each in dtypes):
            return None
        if operators.shape(rows) != shapes[1]:
            return None
        return SummedRows(node, taken.order, taken.top_k, given[0], given[1] if len(given) > 1 else None)  # type: ignore[arg-type]

    def _number_of(self, node: fx.Node) -> Any:
        return self.operators.number(self.operators.value(node))

    def _behind(self, value: Value) -> Value | None:
        """What ``value`` has the elements of, in their order."""
        call = self._does(value)
        if call is None or call.overload is not aten.view.default:
            return None
        source = call.arguments["self"]
        return source if isinstance(source, Value) else None

    def _widened(self, value: Value) -> Value:
        """What ``value`` is a copy of, in a dtype that holds all of its numbers: autocast adds in fp32."""
        while self._does(value) is not None and (source := copied_from(self.operators, value)) is not None:
            given, got = self.operators.meta(source), self.operators.meta(value)
            if given.shape != got.shape or torch.promote_types(given.dtype, got.dtype) != got.dtype:
                break
            value = source
        return value

    def _weighted(self, value: Value, order: Value) -> tuple[Value, Value | None]:
        """(rows, weights by slot), of ``rows * weights[order][:, None]``; else ``value`` and None."""
        call = self._does(value)
        if call is not None and call.overload is aten.mul.Tensor:
            factors = [call.arguments[name] for name in ("self", "other")]
            for rows, factor in (factors, factors[::-1]):
                weights = self._by_slot(factor, order) if isinstance(factor, Value) else None
                if weights is not None and isinstance(rows, Value):
                    return self._saved(rows), weights
        return value, None

    def _saved(self, rows: Value) -> Value:
        """What ``rows`` is a wider copy of, if that can be kept for backward instead: nobody writes it meanwhile."""
        source = self._widened(rows)
        node = self.operators.node_of(source)
        is_private = node is not None and self.operators.numbering.is_private_after(storages_of(value_of(node)), node)
        return source if is_private else rows

    def _by_slot(self, factor: Value, order: Value) -> Value | None:
        """``w`` of ``w[order][:, None]``: ``[slots]`` or ``[slots, 1]``."""
        operators = self.operators
        shape = operators.shape(factor)
        if len(shape) != 2 or shape[1] != 1:
            return None
        call = self._does(self._widened(factor))
        if call is not None and (call.operator is aten.unsqueeze or call.overload is aten.view.default):
            factor = call.arguments["self"]
        found = self._indexed(self._widened(factor))
        if found is None or operators.number(found[1]) != operators.number(order):
            return None
        given = operators.shape(found[0])
        return found[0] if given[0] == operators.shape(order)[0] and given[1:] in ((), (1,)) else None

    def _undone(self, inverse: Value) -> Value | None:
        """The ``order`` of which ``inverse[order[i]]`` is ``i`` for all ``i``."""
        sort = sort_of(self.operators, inverse)
        if sort is not None:  # of the places of another one
            return None if sort.arguments["descending"] else self._order(sort.arguments["self"])
        call = self.operators.does(inverse)
        if inverse.step == UNTRACKED:
            writers = [write.writer for write in self.operators.numbering.writes if write.time == inverse.since]
            calls = self.operators.calls(writers[0]) if len(writers) == 1 and writers[0] is not None else None
            call = calls[-1] if calls else None
            if call is None or self.operators.value(inverse.node) != call.arguments.get("self"):
                return None
        match call:
            case Call(
                aten.index_put,
                {"indices": (Value() as places,), "values": Value() as values} as given,
            ) if not given["accumulate"] and self._element(values, _ROW) == _ROW:
                return self._order(places)
        return None

    # -- masks that hold nowhere

    def _never_holds(self, mask: Any) -> bool:
        """Is ``mask`` ``numbers >= n``, or ``numbers > n``, of numbers that are less?"""
        while isinstance(mask, Value) and (call := self.operators.does(mask)) is not None:
            match call:
                case Call(aten.ge, {"self": Value() as numbers, "other": int() as least}):
                    return self._is_less(numbers, least)
                case Call(aten.gt, {"self": Value() as numbers, "other": int() as least}):
                    return self._is_less(numbers, least + 1)
            if call.operator is not aten.unsqueeze and call.overload is not aten.view.default:
                return False
            mask = call.arguments["self"]
        return False

    def _is_less(self, numbers: Value, bound: int) -> bool:
        """Are all of these integers less than ``bound``?"""
        call = self.operators.does(numbers)
        source = call.arguments.get("self") if call is not None else None
        if call is None or not isinstance(source, Value) or self.operators.dtype(numbers) not in INDEX_DTYPES:
            return False
        is_place = call.operator in (aten.argmax, aten.argmin)
        if is_place or (call.operator in (aten.topk, aten.sort, aten.max, aten.min) and numbers.leaf == 1):
            shape, dim = self.operators.shape(source), call.arguments.get("dim")
            size = shape[dim] if isinstance(dim, int) and shape else None
            return isinstance(size, int | sympy.Integer) and int(size) <= bound
        is_same = call.overload is aten.view.default or call.operator in (aten.unsqueeze, aten.sort)
        return (is_same or copied_from(self.operators, numbers) is not None) and self._is_less(source, bound)

    def _may_stand_for(self, source: fx.Node, node: fx.Node, call: Call) -> bool:
        """May who is given a copy be given ``source`` itself?"""
        if call.written:
            return True
        numbering = self.operators.numbering
        memory = [storages_of(value_of(each)) for each in (source, node)]
        return all(numbering.is_private_after(each, node) for each in memory)


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_floating_point()


def _is_vector(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype in INDEX_DTYPES
