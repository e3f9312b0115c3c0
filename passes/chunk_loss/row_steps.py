"""Operators that pick, order or reshape the rows of logits, as the same operators on what has a row for each of theirs.

Logits have their classes in some dimension; *rows* are the other dimensions, in order. A step on them applies to hidden
states ``[*rows, K]`` as it does to numbers ``[*rows]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.compat.symbols import unbacked_symbols
from glue_compiler.fx.operators import Call, Operators, Value

aten = torch.ops.aten

PUT_ROWS = torch.ops.glue.put_rows.default
"""Its other rows are zeros, of which a product without a bias makes zeros."""


class NotALoss(Exception):
    """A use of logits that a loss without logits cannot serve; the message says which."""


@dataclass(frozen=True)
class RowStep:
    """One step.

    Attributes:
        kind: ``"reshape"``: to the rows ``arguments``. ``"permute"``: of the rows, by ``arguments``. ``"call"``:
            ``operator(rows, *arguments)``, of which it takes result ``leaf`` where that is a number.
        arguments: numbers, expressions, and values of tensors.
    """

    kind: Literal["reshape", "permute", "call"]
    arguments: tuple[Any, ...]
    operator: Any = None
    leaf: int | None = None


@dataclass(frozen=True)
class Rows:
    """What ``call`` reads: a tensor of ``shape``, of which dimension ``classes`` holds the classes.

    Attributes:
        result: the shape of what the call gives, or of its item ``leaf``.
    """

    call: Call
    shape: tuple[Any, ...]
    classes: int
    result: tuple[Any, ...]
    leaf: int

    def __getitem__(self, name: str) -> Any:
        return self.call.arguments[name]

    def dim(self, dim: int) -> int:
        """Which of the rows a dimension is."""
        dim %= len(self.shape)
        if dim == self.classes:
            raise NotALoss("only some of its classes are taken, or their dimension is changed")
        return dim - (dim > self.classes)


Found = tuple[RowStep | None, int]
"""The step, if rows change, and which dimension of the result holds the classes."""


def row_step(call: Call, classes: int, value: Value, operators: Operators) -> Found | None:
    """What ``call`` does with the rows of its argument ``self``, whose dimension ``classes`` holds the classes.

    None: it is no operator that picks or reshapes.

    Raises:
        NotALoss: it is one, in a form that changes classes, or is not understood.
    """
    read = _READERS.get(call.operator)
    if read is None:
        return None
    source, result = operators.meta(call.arguments["self"]), operators.meta(value)
    if (result.dtype, result.device) != (source.dtype, source.device):
        raise NotALoss("it is read as other bits")
    if unbacked_symbols(result.shape) - unbacked_symbols(source.shape):
        raise NotALoss("how many of its rows are taken is only known when the graph runs")
    return read(Rows(call, source.shape, classes, result.shape, value.leaf))


def _same(rows: Rows) -> Found:
    return None, rows.classes


def _expand(rows: Rows) -> Found:
    if rows.result != rows.shape:
        raise NotALoss("its rows are repeated")
    return None, rows.classes


def _slice(rows: Rows) -> Found:
    if rows.result == rows.shape and rows["step"] == 1:
        return None, rows.classes
    dim = rows.dim(rows["dim"])
    start, end, step = (rows[name] for name in ("start", "end", "step"))
    return RowStep("call", (dim, start, end, step), aten.slice.Tensor), rows.classes


def _select(rows: Rows) -> Found:
    dim = rows["dim"] % len(rows.shape)
    step = RowStep("call", (rows.dim(dim), rows["index"]), aten.select.int)
    return step, rows.classes - (dim < rows.classes)


def _unsqueeze(rows: Rows) -> Found:
    dim = rows["dim"] % len(rows.result)
    step = RowStep("call", (dim - (dim > rows.classes),), aten.unsqueeze.default)
    return step, rows.classes + (dim <= rows.classes)


def _squeeze(rows: Rows) -> Found:
    rank, given = len(rows.shape), rows.call.arguments.get("dim")
    dims = range(rank) if given is None else given if isinstance(given, tuple) else (given,)
    dropped = sorted({dim % rank for dim in dims if rows.shape[dim % rank] == 1})
    if rank - len(dropped) != len(rows.result):
        raise NotALoss("sizes of one that are not known to be that are dropped")
    step = RowStep("call", (tuple(rows.dim(dim) for dim in dropped),), aten.squeeze.dims)
    return (step if dropped else None), rows.classes - sum(dim < rows.classes for dim in dropped)


def _permute(rows: Rows) -> Found:
    rank = len(rows.shape)
    dims = [dim % rank for dim in rows["dims"]]
    kept = tuple(rows.dim(dim) for dim in dims if dim != rows.classes)
    step = None if kept == tuple(range(rank - 1)) else RowStep("permute", kept)
    return step, dims.index(rows.classes)


def _reshape(rows: Rows) -> Found:
    if rows.result == rows.shape:
        return None, rows.classes
    if rows.classes != len(rows.shape) - 1 or not rows.result or rows.result[-1] != rows.shape[-1]:
        raise NotALoss("its classes are not the last dimension before and after a reshape")
    return RowStep("reshape", rows.result[:-1]), len(rows.result) - 1


def _index(rows: Rows) -> Found:
    indices = rows["indices"]
    if rows.classes != len(rows.shape) - 1 or len(indices) > rows.classes:
        raise NotALoss("some of its classes are taken by an index")
    return RowStep("call", (indices,), aten.index.Tensor), len(rows.result) - 1


def _index_select(rows: Rows) -> Found:
    step = RowStep("call", (rows.dim(rows["dim"]), rows["index"]), aten.index_select.default)
    return step, rows.classes


def _put_rows(rows: Rows) -> Found:
    if not rows.classes:
        raise NotALoss("its classes are in the dimension of rows that are put back")
    arguments = tuple(rows[name] for name in ("rows", "numbers", "seen", "starts"))
    return RowStep("call", arguments, PUT_ROWS), rows.classes


def _spread_rows(rows: Rows) -> Found:
    if not rows.classes:
        raise NotALoss("its classes are in the dimension of rows that are spread")
    return RowStep("call", (rows["index"],), torch.ops.glue.spread_rows.default), rows.classes


def _parts(*names: str) -> Any:
    def read(rows: Rows) -> Found:
        dim = rows["dim"] % len(rows.shape)
        arguments = (*(rows[name] for name in names), rows.dim(dim))
        lost = len(rows.shape) - len(rows.result)
        return RowStep("call", arguments, rows.call.overload, rows.leaf), rows.classes - (dim < rows.classes) * lost

    return read


_READERS: dict[Any, Callable[[Rows], Found]] = {
    **dict.fromkeys((aten.alias, aten.clone, aten.detach, aten.lift_fresh), _same),
    aten.expand: _expand,
    aten.slice: _slice,
    aten.select: _select,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.permute: _permute,
    aten.view: _reshape,
    aten.index: _index,
    aten.index_select: _index_select,
    PUT_ROWS.overloadpacket: _put_rows,
    torch.ops.glue.spread_rows: _spread_rows,
    aten.split: _parts("split_size"),
    aten.split_with_sizes: _parts("split_sizes"),
    aten.chunk: _parts("chunks"),
    aten.unbind: _parts(),
}
"""By the operator; each takes its tensor as ``self``. Of ``view`` by dtype the results are other bits."""


def is_row_operator(operator: Any) -> bool:
    return operator in _READERS
