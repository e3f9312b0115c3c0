"""Views and copies of tensors as maps of indices: which element of the source an element of the result is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from glue_compiler.fx.operators import Operators, Value
from glue_compiler.fx.values import Symbolic, expression

aten = torch.ops.aten

Index = tuple[sympy.Expr, ...]
"""One expression for each dimension of a tensor, counted from 0."""
Shape = tuple[Any, ...]


class NotAView(Exception):
    """The operator, or this form of it, is not a map of indices."""


@dataclass(frozen=True)
class Element:
    """Element ``index`` of ``value``."""

    value: Value
    index: Index


def number_of(value: Any) -> Any:
    """An int, float, bool or symbolic argument as a number of sympy's."""
    if isinstance(value, Symbolic):
        value = expression(value)
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, float):
        if math.isnan(value):
            return sympy.nan
        if math.isinf(value):
            return sympy.oo if value > 0 else -sympy.oo
        return sympy.Integer(int(value)) if value.is_integer() else sympy.Float(value)
    if isinstance(value, int | sympy.Basic):
        return sympy.sympify(value)
    raise NotAView(f"{value!r} is not a number")


def broadcast_index(index: Index, shape: Sequence[Any]) -> Index:
    """The index into an operand of ``shape`` for element ``index`` of a result that it is broadcast to."""
    last = index[len(index) - len(shape) :]
    return tuple(sympy.Integer(0) if size == 1 else i for i, size in zip(last, shape, strict=True))


def reshaped_index(index: Index, shape: Sequence[Any], result: Sequence[Any]) -> Index:
    """The index into a tensor of ``shape`` for element ``index`` of it in the sizes ``result``, in the same order.

    Raises:
        NotAView: the sizes are not known to fit.
    """
    return broadcast_index(_reshape({}, tuple(shape), tuple(result), index), shape)


def source_of(operators: Operators, value: Value, index: Index) -> Element:
    """The element, of what the operator behind ``value`` reads, that element ``index`` of ``value`` is.

    Raises:
        NotAView: the operator computes something, or its arguments are not understood.
    """
    call = operators.does(value)
    read = _VIEWS.get(call.operator) if call is not None else None
    source = call.arguments.get("self") if call is not None else None
    if call is None or read is None or not isinstance(source, Value) or not operators.is_tensor(source):
        raise NotAView(f"{value} is not a view")
    before, after = operators.meta(source), operators.meta(value)
    if before.dtype != after.dtype:
        raise NotAView("a view of other bits")
    found = read(call.arguments, before.shape, after.shape, index)
    return Element(source, broadcast_index(found, before.shape))


# -- operators: (arguments, shape of the source, shape of the result, index) → index into the source

Arguments = Mapping[str, Any]


def _dimension(value: Any, rank: int) -> int:
    if not isinstance(value, int) or not -rank <= value < rank:
        raise NotAView(f"dimension {value!r}")
    return value % rank


def _same(given: Arguments, shape: Shape, result: Shape, index: Index) -> Index:
    return index


def _expand(given: Arguments, shape: Shape, result: Shape, index: Index) -> Index:
    return index[len(index) - len(shape) :]


def _repeat(given: Arguments, shape: Shape, result: Shape, index: Index) -> Index:
    last = index[len(index) - len(shape) :]
    times = given["repeats"][len(index) - len(shape) :]
    return tuple(i if n == 1 else sympy.Mod(i, size) for i, size, n in zip(last, shape, times, strict=True))


def _repeat_interleave(given: Arguments, shape: Shape, result: Shape, index: Index) -> Index:
    times, dim = given["repeats"], given.get("dim")
    if not isinstance(times, int) or times < 1 or dim is None:
        raise NotAView("repeat_interleave by a tensor")
    dim = _dimension(dim, len(shape))
    return (*index[:dim], sympy.floor(index[dim] / times), *index[dim + 1 :])


def _unsqueeze(given: Arguments, shape: Shape, result: Shape, index: Index) -> Index:
    dim = _dimension(given["dim"], len(index))
    return index[:dim] + index[dim + 1 :]


def _squeeze(given: Arguments, shape: Shape, result: Shape, index: Index) -> Index:
    dim = given.get("dim")
    dims = range(len(shape)) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    dropped = {d for d in (_dimension(d, len(shape)) for d in dims) if shape[d] == 1}
    if len(shape) - len(dropped) != len(index):
        raise NotAView("squeeze of an unknown size")
    left = iter(index)
    return tuple(sympy.Integer(0) if d in dropped else next(left) for d in range(len(shape)))


def _permute(given: Arguments, shape: Shape, result: Shape, index: Index) -> Index:
    order = [_dimension(d, len(shape)) for d in given["dims"]]
    return tuple(index[order.index(d)] for d in range(len(shape)))


def _select(given: Arguments, shape: Shape, result: Shape, index: Index) -> Index:
    dim = _dimension(given["dim"], len(shape))
    return (*index[:dim], _from_start(given["index"], shape[dim]), *index[dim:])


def _slice(given: Arguments, shape: Shape, result: Shape, index: Index) -> Index:
    dim = _dimension(given["dim"], len(shape))
    step = given["step"]
    if not isinstance(step, int) or step < 1:
        raise NotAView(f"a slice with step {step}")
    start = given["start"]
    first = sympy.Integer(0) if start is None else _from_start(start, shape[dim], clamped=True)
    return (*index[:dim], index[dim] * step + first, *index[dim + 1 :])


def _from_start(place: Any, size: Any, clamped: bool = False) -> sympy.Expr:
    """A place along a dimension, from the end if it is negative. ``clamped``: as Python does it, to the first."""
    place = number_of(place) if not isinstance(place, Value) else None
    if place is None or not place.is_integer:
        raise NotAView("a place that is a tensor")
    if place.is_nonnegative:
        return place
    if not place.is_Integer or (clamped and not isinstance(size, int)):
        raise NotAView("a place of unknown sign, or from an unknown end")
    return sympy.sympify(max(int(place) + size, 0) if clamped else place + size)


def _reshape(given: Arguments, shape: Shape, result: Shape, index: Index) -> Index:
    found: list[sympy.Expr] = []
    for old, new in _groups(list(shape), list(result)):
        linear: Any = sympy.Integer(0)
        for position, size in new:
            linear = linear * size + index[position]
        steps = [sympy.Integer(1)]
        for _, size in reversed(old[1:]):
            steps.insert(0, steps[0] * size)
        for (_, size), step, is_first in zip(old, steps, [True] + [False] * len(old), strict=False):
            # The first size of a group bounds the quotient anyway.
            found.append(sympy.floor(linear / step) if is_first else sympy.Mod(sympy.floor(linear / step), size))
    return tuple(found)


def _groups(old: list[Any], new: list[Any]) -> list[tuple[list[tuple[int, Any]], list[tuple[int, Any]]]]:
    """Consecutive dimensions of both shapes with equal products, in the smallest groups; (position, size) each."""
    if 0 in old:
        raise NotAView("a reshape of nothing")
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        first: list[tuple[int, Any]] = []
        second: list[tuple[int, Any]] = []
        while not first or not second or math.prod(s for _, s in first) != math.prod(s for _, s in second):
            ours, theirs = math.prod(s for _, s in first), math.prod(s for _, s in second)
            is_less = bool(second) and (not isinstance(ours, int) or ours < _as_int(theirs))
            if i < len(old) and (not first or is_less):
                first.append((i, old[i]))
                i += 1
            elif j < len(new):
                second.append((j, new[j]))
                j += 1
            elif i < len(old):
                first.append((i, old[i]))
                i += 1
            elif (first and all(size == 1 for _, size in first)) or (second and all(size == 1 for _, size in second)):
                break
            else:
                raise NotAView("a reshape of unknown sizes")
        groups.append((first, second))
    return groups


def _as_int(size: Any) -> Any:
    return size if isinstance(size, int) else math.inf


_View = Callable[[Arguments, Shape, Shape, Index], Index]
_VIEWS: dict[Any, _View] = {
    aten.alias: _same,
    aten.clone: _same,
    aten.detach: _same,
    aten.lift_fresh: _same,
    aten.expand: _expand,
    aten.repeat: _repeat,
    aten.repeat_interleave: _repeat_interleave,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.permute: _permute,
    aten.select: _select,
    aten.slice: _slice,
    aten.view: _reshape,
}
"""By the operator; each takes its tensor as ``self``."""
