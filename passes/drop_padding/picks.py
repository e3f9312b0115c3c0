"""Reads of one token of a row: of one that is hidden they find zeros."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.index_expressions import Unreadable
from glue_compiler.fx.index_views import NotAView
from glue_compiler.fx.operators import Call, Value
from glue_compiler.fx.values import leaves
from glue_compiler.passes.drop_padding.token_facts import Dim, Rows, Span, Tokens, plain
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader

aten = torch.ops.aten

_Dims = tuple[Dim, ...]


def picks_single_tokens(node: fx.Node, tokens_of: Callable[[Any], Tokens | None], reader: MaskReader) -> bool:
    """Does ``node`` take one token of a row at most, of each that it takes?

    What reads its result finds no two tokens of a row then. Several, some of them hidden, could be averaged.
    """
    left: dict[Value, _Dims] = {}
    for number, call in enumerate(reader.operators.calls(node) or ()):
        given = [each for each in leaves(list(call.arguments.values())) if isinstance(each, Value)]
        read = {each: tokens.dims for each in given if (tokens := tokens_of(each)) is not None}
        read |= {each: left[each] for each in given if each in left}
        if not read:
            continue
        pick = _PICKS.get(call.operator)
        if pick is None or list(read) != [call.arguments.get("self")]:
            return False
        (dims,), result = read.values(), Value(node, number)
        taken = pick(call, dims, reader.operators.shape(result), reader)
        if taken is None:
            return False
        left[result] = taken
    found = left.get(reader.operators.value(node))
    return found is not None and _span_place(found) is None


def _select(call: Call, dims: _Dims, shape: tuple[Any, ...], reader: MaskReader) -> _Dims:
    dim = call.arguments["dim"] % len(dims)
    return (*dims[:dim], *dims[dim + 1 :])


def _part(call: Call, dims: _Dims, shape: tuple[Any, ...], reader: MaskReader) -> _Dims:
    """Of ``slice`` and ``index_select``."""
    dim = call.arguments["dim"] % len(dims)
    is_many = shape[dim] not in (0, 1) and any(isinstance(part, Span) for part in dims[dim])
    return (*dims[:dim], dims[dim] if is_many else plain(shape[dim]), *dims[dim + 1 :])


def _index(call: Call, dims: _Dims, shape: tuple[Any, ...], reader: MaskReader) -> _Dims | None:
    given = {place: each for place, each in enumerate(call.arguments["indices"]) if each is not None}
    if any(reader.operators.dtype(each) in (torch.bool, torch.uint8) for each in given.values()):
        return None
    place = _span_place(dims)
    if place is not None and not _is_one_of_each_row(place, given, dims, reader):
        return None
    return tuple(map(plain, shape))


def _is_one_of_each_row(place: int, given: dict[int, Value], dims: _Dims, reader: MaskReader) -> bool:
    """Is it the same token of all rows, or one of row 0, one of row 1, ...?"""
    shapes = {each: reader.shape(index) for each, index in given.items()}
    if math.prod(shapes.get(place, (0,))) == 1:
        return True
    rows = next((each for each in given if len(shapes[each]) == 1 and dims[each] == (Rows(shapes[each][0]),)), None)
    if rows is None or place not in given or len(dims[place]) > 1 or any(len(shape) > 1 for shape in shapes.values()):
        return False
    row = sympy.Symbol("row", integer=True, nonnegative=True)
    try:
        return bool(reader.read(given[rows], (row,)) == row)
    except (Unreadable, NotAView):
        return False


def _span_place(dims: _Dims) -> int | None:
    return next((i for i, dim in enumerate(dims) if any(isinstance(part, Span) for part in dim)), None)


_PICKS: dict[Any, Callable[[Call, _Dims, tuple[Any, ...], MaskReader], _Dims | None]] = {
    aten.select: _select,
    aten.slice: _part,
    aten.index_select: _part,
    aten.index: _index,
}
