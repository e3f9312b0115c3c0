"""Operators that pick, order or reshape the rows of logits, as the same operators on what has a row for each of theirs.

Logits have their classes in some dimension; *rows* are the other dimensions, in order. A step on them applies to hidden
states ``[*rows, K]`` as it does to numbers ``[*rows]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from glue_compiler.compat import unbacked_symbols
from glue_compiler.fx.operators import Call, Operators, Value

aten = torch.ops.aten


class NotARowStep(Exception):
    """The operator does something else than to pick rows; the message says what."""


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
    """The shape of a tensor, of which dimension ``classes`` holds the classes."""

    shape: tuple[Any, ...]
    classes: int

    def dim(self, dim: int) -> int:
        """Which of the rows a dimension is."""
        dim %= len(self.shape)
        if dim == self.classes:
            raise NotARowStep("only some of its classes are taken, or their dimension is changed")
        return dim - (dim > self.classes)


Found = tuple[RowStep | None, int]
"""The step, if rows change, and which dimension of the result holds the classes."""


def row_step(call: Call, classes: int, value: Value, operators: Operators) -> Found | None:
    """What ``call`` does with the rows of its argument ``self``, whose dimension ``classes`` holds the classes.

    None: it is no operator that picks or reshapes.

    Raises:
        NotARowStep: it is one, in a form that changes classes, or is not understood.
    """
    read = _READERS.get(call.operator)
    if read is None:
        return None
    rows = Rows(operators.meta(call.arguments["self"]).shape, classes)
    result = operators.meta(value)
    source = operators.meta(call.arguments["self"])
    if (result.dtype, result.device) != (source.dtype, source.device):
        raise NotARowStep("it is read as other bits")
    if unbacked_symbols(result.shape) - unbacked_symbols(source.shape):
        raise NotARowStep("how many of its rows are taken is only known when the graph runs")
    return read(call, rows, result.shape, value.leaf)


def _same(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
    return None, rows.classes


def _expand(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
    if result != rows.shape:
        raise NotARowStep("its rows are repeated")
    return None, rows.classes


def _slice(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
    if result == rows.shape and call.arguments["step"] == 1:
        return None, rows.classes
    dim = rows.dim(call.arguments["dim"])
    start, end, step = (call.arguments[name] for name in ("start", "end", "step"))
    return RowStep("call", (dim, start, end, step), aten.slice.Tensor), rows.classes


def _narrow(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
    if result == rows.shape:
        return None, rows.classes
    start, length = call.arguments["start"], call.arguments["length"]
    if isinstance(start, Value):
        raise NotARowStep("its rows begin where a tensor says")
    return RowStep("call", (rows.dim(call.arguments["dim"]), start, length), aten.narrow.default), rows.classes


def _select(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
    dim = call.arguments["dim"] % len(rows.shape)
    step = RowStep("call", (rows.dim(dim), call.arguments["index"]), aten.select.int)
    return step, rows.classes - (dim < rows.classes)


def _unsqueeze(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
    dim = call.arguments["dim"] % len(result)
    step = RowStep("call", (dim - (dim > rows.classes),), aten.unsqueeze.default)
    return step, rows.classes + (dim <= rows.classes)


def _squeeze(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
    rank, given = len(rows.shape), call.arguments.get("dim")
    dims = range(rank) if given is None else given if isinstance(given, tuple) else (given,)
    dropped = sorted({dim % rank for dim in dims if rows.shape[dim % rank] == 1})
    if rank - len(dropped) != len(result):
        raise NotARowStep("sizes of one that are not known to be that are dropped")
    step = RowStep("call", (tuple(rows.dim(dim) for dim in dropped),), aten.squeeze.dims)
    return (step if dropped else None), rows.classes - sum(dim < rows.classes for dim in dropped)


def _ordered(order: Callable[[Call, int], list[int]]) -> Any:
    def read(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
        rank = len(rows.shape)
        dims = [dim % rank for dim in order(call, rank)]
        kept = tuple(rows.dim(dim) for dim in dims if dim != rows.classes)
        step = None if kept == tuple(range(rank - 1)) else RowStep("permute", kept)
        return step, dims.index(rows.classes)

    return read


def _swapped(first: str, second: str) -> Any:
    def order(call: Call, rank: int) -> list[int]:
        dims = list(range(rank))
        one, other = call.arguments[first] % rank, call.arguments[second] % rank
        dims[one], dims[other] = dims[other], dims[one]
        return dims

    return _ordered(order)


def _moved(call: Call, rank: int) -> list[int]:
    sources, places = call.arguments["source"], call.arguments["destination"]
    pairs = {place % rank: source % rank for source, place in zip(sources, places, strict=True)}
    others = iter(dim for dim in range(rank) if dim not in pairs.values())
    return [pairs[place] if place in pairs else next(others) for place in range(rank)]


def _reshape(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
    if result == rows.shape:
        return None, rows.classes
    if rows.classes != len(rows.shape) - 1 or not result or result[-1] != rows.shape[-1]:
        raise NotARowStep("its classes are not the last dimension before and after a reshape")
    return RowStep("reshape", result[:-1]), len(result) - 1


def _index(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
    indices = call.arguments["indices"]
    if rows.classes != len(rows.shape) - 1 or len(indices) > rows.classes:
        raise NotARowStep("some of its classes are taken by an index")
    return RowStep("call", (indices,), aten.index.Tensor), len(result) - 1


def _index_select(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
    step = RowStep("call", (rows.dim(call.arguments["dim"]), call.arguments["index"]), aten.index_select.default)
    return step, rows.classes


def _parts(*names: str) -> Any:
    def read(call: Call, rows: Rows, result: tuple[Any, ...], leaf: int) -> Found:
        dim = call.arguments["dim"] % len(rows.shape)
        arguments = (*(call.arguments[name] for name in names), rows.dim(dim))
        lost = len(rows.shape) - len(result)
        return RowStep("call", arguments, call.overload, leaf), rows.classes - (dim < rows.classes) * lost

    return read


_READERS: dict[Any, Callable[[Call, Rows, tuple[Any, ...], int], Found]] = {
    **dict.fromkeys((aten.alias, aten.clone, aten.contiguous, aten.detach, aten.lift_fresh), _same),
    **dict.fromkeys((aten.expand, aten.expand_as, aten.broadcast_to), _expand),
    aten.slice: _slice,
    aten.narrow: _narrow,
    aten.select: _select,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.transpose: _swapped("dim0", "dim1"),
    aten.swapdims: _swapped("dim0", "dim1"),
    aten.swapaxes: _swapped("axis0", "axis1"),
    aten.t: _ordered(lambda call, rank: list(reversed(range(rank)))),
    aten.mT: _ordered(lambda call, rank: [*range(rank - 2), rank - 1, rank - 2]),
    aten.permute: _ordered(lambda call, rank: list(call.arguments["dims"])),
    **dict.fromkeys(
        (
            aten.view,
            aten.view_as,
            aten.reshape,
            aten.reshape_as,
            aten.flatten,
            aten.unflatten,
            aten._unsafe_view,
        ),
        _reshape,
    ),
    aten.index: _index,
    aten.index_select: _index_select,
    aten.split: _parts("split_size"),
    aten.split_with_sizes: _parts("split_sizes"),
    aten.chunk: _parts("chunks"),
    aten.unbind: _parts(),
}
"""By the operator; each takes its tensor as ``self``. Of ``view`` by dtype the results are other bits."""


def is_row_operator(operator: Any) -> bool:
    return operator in _READERS
