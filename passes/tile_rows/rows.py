"""Which steps of a graph keep rows apart: row ``i`` of their result depends on row ``i`` of their operands alone.

A tensor of ``N`` rows has them in its leading dimensions, whose sizes have the product ``N``; in a matrix they may be
the columns. ATen graphs, read from operators and sizes. Changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.values import expression, is_plain, value_of

aten = torch.ops.aten

_UNTAGGED_POINTWISE = {aten._to_copy.default, aten.detach.default, aten.alias.default}
SIZED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}
"""Their second argument is the size of the result."""
_REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default}
_TRANSPOSITIONS = {aten.permute.default, aten.transpose.int, aten.t.default}
_SUMMED_EXACTLY_ENOUGH = (torch.float32, torch.float64)
"""In narrower ones, a sum of tiles would be rounded once for each tile."""


class Rows(enum.Enum):
    """Where a tensor has the rows."""

    LEADING = "leading dimensions"
    COLUMNS = "columns of a matrix"
    SUMMED = "summed up over all rows"


@dataclass(frozen=True)
class RowStep:
    """``result``: where a step has the rows if it takes those of ``sliced``, and all of every other operand."""

    result: Rows
    sliced: frozenset[fx.Node]


def operands_of(node: fx.Node) -> list[Any]:
    """What a step reads, but for the sizes of its result."""
    return [node.args[0]] if node.target in SIZED else node.all_input_nodes


def leading_dims(node: fx.Node, rows: Any) -> int:
    """How many leading dimensions are the rows; 0: none are. ``rows``: as an expression."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not is_plain(value):
        return 0
    product: Any = 1
    for dim, size in enumerate(value.shape):
        product = product * expression(size)
        if product == rows:
            return dim + 1
    return 0


def row_elements(node: fx.Node, rows: Any) -> int:
    """The elements of one row; 0 where that is not a number."""
    total = 1
    for size in value_of(node).shape[leading_dims(node, rows) :]:
        if not isinstance(size, int):
            return 0
        total *= size
    return total


def find_row_steps(graph: fx.Graph, rows: Any) -> dict[fx.Node, RowStep]:
    """The steps that keep ``rows`` apart.

    A value that no such step makes counts as one of rows if it has the size: whatever it is, its parts can be taken.
    """
    places: dict[fx.Node, Rows] = {}
    steps: dict[fx.Node, RowStep] = {}
    for node in graph.nodes:
        step = _Reader(node, rows, places.get).read()
        if step is not None:
            steps[node] = step
            places[node] = step.result
        elif leading_dims(node, rows):
            places[node] = Rows.LEADING
    return steps


class _Reader:
    def __init__(self, node: fx.Node, rows: Any, place: Callable[[fx.Node], Rows | None]) -> None:
        self.node = node
        self.rows = rows
        self.place = place

    def read(self) -> RowStep | None:
        target = self.node.target
        if self.node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            return None
        value = value_of(self.node)
        if target._schema.is_mutable or not isinstance(value, torch.Tensor) or not is_plain(value):
            return None
        if torch.Tag.nondeterministic_seeded in target.tags:
            return None
        if torch.Tag.pointwise in target.tags or target in _UNTAGGED_POINTWISE:
            return self._pointwise()
        if target in SIZED:
            return self._view()
        if target in _REDUCTIONS:
            return self._reduction()
        if target in _TRANSPOSITIONS:
            return self._transposed()
        return self._product()

    def _operands(self) -> Any:
        return self.node.args

    def _rank(self, node: Any) -> int:
        return value_of(node).dim()

    def _leading(self, node: Any) -> int:
        """How many dimensions of an operand are rows."""
        is_row = isinstance(node, fx.Node) and self.place(node) is Rows.LEADING
        return leading_dims(node, self.rows) if is_row else 0

    def _tail_is_known(self) -> bool:
        return row_elements(self.node, self.rows) > 0

    def _pointwise(self) -> RowStep | None:
        own, rank = leading_dims(self.node, self.rows), self._rank(self.node)
        tensors = [each for each in self.node.all_input_nodes if isinstance(value_of(each), torch.Tensor)]
        sliced = set()
        for operand in tensors:
            shift = rank - self._rank(operand)
            if self.place(operand) is Rows.COLUMNS:
                return None
            if own and (found := self._leading(operand)) and found + shift == own:
                sliced.add(operand)
            elif any(size != 1 for size in value_of(operand).shape[: max(own - shift, 0)]):
                return None
        return RowStep(Rows.LEADING, frozenset(sliced)) if own and sliced and self._tail_is_known() else None

    def _view(self) -> RowStep | None:
        """Row-major, and as many rows before as after: each row keeps its elements."""
        operand: Any = self.node.args[0]
        if not self._leading(operand) or not leading_dims(self.node, self.rows) or not self._tail_is_known():
            return None
        if self.node.target is aten.expand.default:
            same = self._rank(operand) == self._rank(self.node)
            if not same or self._leading(operand) != leading_dims(self.node, self.rows):
                return None
        return RowStep(Rows.LEADING, frozenset({operand}))

    def _reduction(self) -> RowStep | None:
        operand: Any = self.node.args[0]
        leading = self._leading(operand)
        dims: Any = self.node.args[1] if len(self.node.args) > 1 else self.node.kwargs.get("dim")
        if not leading or not isinstance(dims, Sequence) or not dims:
            return None
        rank = self._rank(operand)
        along = {dim % rank for dim in dims}
        sliced = frozenset({operand})
        if min(along) >= leading:
            return RowStep(Rows.LEADING, sliced) if self._tail_is_known() else None
        exact = value_of(self.node).dtype in _SUMMED_EXACTLY_ENOUGH
        if self.node.target is aten.sum.dim_IntList and along == set(range(leading)) and exact:
            return RowStep(Rows.SUMMED, sliced)
        return None

    def _transposed(self) -> RowStep | None:
        operand: Any = self.node.args[0]
        if self._rank(operand) != 2 or not _swaps(self.node):
            return None
        sliced = frozenset({operand})
        if self._leading(operand) == 1 and isinstance(value_of(operand).shape[1], int):
            return RowStep(Rows.COLUMNS, sliced)
        if self.place(operand) is Rows.COLUMNS:
            return RowStep(Rows.LEADING, sliced)
        return None

    def _product(self) -> RowStep | None:
        if self.node.target is aten.addmm.default:
            bias, left, right = self._operands()
            if any(size != 1 for size in value_of(bias).shape[:-1]):
                return None
        elif self.node.target is aten.mm.default:
            bias, (left, right) = None, self._operands()
        else:
            return None
        if self._leading(left) == 1 and right is not left and bias is not left:
            return RowStep(Rows.LEADING, frozenset({left})) if self._tail_is_known() else None
        exact = value_of(self.node).dtype in _SUMMED_EXACTLY_ENOUGH
        is_sum = bias is None and self.place(left) is Rows.COLUMNS and self._leading(right) == 1
        return RowStep(Rows.SUMMED, frozenset({left, right})) if is_sum and exact else None


def _swaps(node: fx.Node) -> bool:
    """Does it swap the dimensions of a matrix? Not so ``transpose(0, 0)``."""
    if node.target is aten.t.default:
        return True
    dims: Any = node.args[1:] if node.target is aten.transpose.int else node.args[1]
    return len(dims) == 2 and dims[0] % 2 != dims[1] % 2 and (node.target is aten.transpose.int or dims[0] % 2 == 1)
