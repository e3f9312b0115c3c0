"""Lemmas about per-token vectors: which are constant on contiguous runs of tokens, and which grow by one on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch

from glue_compiler.fx.index_numbers import as_boolean
from glue_compiler.fx.index_operators import INDEX_DTYPES, is_non_negative
from glue_compiler.fx.index_views import Index, NotAView, number_of
from glue_compiler.fx.operators import Call, Value
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader

aten = torch.ops.aten

BATCH, HEAD, QUERY, KEY = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "bhqk")
TOKEN = sympy.Symbol("t", integer=True, positive=True)
"""A token that is not the first of its row."""


def over_tokens(expression: Any) -> Any | None:
    """An expression of ``QUERY`` as one of ``TOKEN``; None if it says something else of the first token of a row."""
    vector = expression.xreplace({QUERY: TOKEN})
    return vector if vector.xreplace({TOKEN: QUERY}) == expression else None


def is_monotone(vector: Any, reader: MaskReader, *, assume_sorted: bool) -> bool:
    """Is ``vector``, an expression of ``TOKEN``, proved never to decrease, or never to increase, along a row?

    Its runs of equal values are contiguous then, so tokens with equal values are a document. ``assume_sorted``: integer
    leaves are taken to be.
    """
    return _Direction(reader, assume_sorted).of(vector) is not None


@dataclass(frozen=True)
class _Direction:
    reader: MaskReader
    assume_sorted: bool

    def of(self, vector: Any) -> int | None:
        """1: never decreases; -1: never increases; 0: the same for all tokens of a row; None: not proved."""
        if TOKEN not in vector.free_symbols:
            return 0
        if vector == TOKEN:
            return 1
        if isinstance(vector, sympy.Add):
            directions = {self.of(term) for term in vector.args} - {0}
            return directions.pop() if len(directions) == 1 else None
        if isinstance(vector, sympy.Mul):
            factor, rest = vector.as_coeff_Mul()
            direction = self.of(rest) if factor.is_number and factor != 1 else None
            return None if direction is None else direction * (1 if factor > 0 else -1)
        if isinstance(vector, sympy.floor):
            return self.of(vector.args[0])
        return self._of_leaf(getattr(vector.func, "__name__", ""), vector.args)

    def _of_leaf(self, name: str, index: Index) -> int | None:
        value = self.reader.leaves.get(name)
        along = [dim for dim, i in enumerate(index) if TOKEN in i.free_symbols]
        if value is None or len(along) != 1 or index[along[0]] not in (TOKEN, TOKEN - 1):
            return None
        is_assumed = self.assume_sorted and self.reader.dtype(value) in INDEX_DTYPES
        is_sorted = is_assumed or name in self.reader.documents
        return 1 if is_sorted or _never_decreases(value, along[0], self.reader) else None


def _never_decreases(value: Value, dim: int, reader: MaskReader) -> bool:
    """Does the operator behind ``value`` give numbers that never decrease along ``dim``?"""
    if reader.dtype(value) not in INDEX_DTYPES:
        return False
    match reader.operators.does(value):
        case Call(aten.cumsum, {"self": steps, "dim": along}):
            return bool(along % len(reader.shape(value)) == dim) and is_non_negative(steps, reader.operators)
        # Each comparison of a binary search goes to the right for a larger value too, sorted boundaries or not.
        case Call(aten.searchsorted, {"sorted_sequence": boundaries, "self": values, "sorter": None}):
            return len(reader.shape(boundaries)) == 1 and _grows(values, dim, reader)
        case Call(aten.bucketize, {"self": values}):
            return _grows(values, dim, reader)
        case Call(aten.repeat_interleave, {"self": Value() as values, "repeats": Value(), "dim": None | 0 | -1}):
            return len(reader.shape(values)) == 1 and _grows(values, 0, reader)
        # Of a token that ends a document, and belongs to it: counted, and moved by one.
        case Call(aten.cat, {"tensors": (first, counts), "dim": along}):
            if along % len(reader.shape(value)) == dim and _is_of_integers(first, reader):
                return _counts_from(reader.read(first, _places(first, reader)), counts, dim, reader)
        case Call(aten.constant_pad_nd, {"self": counts, "pad": (int() as before, 0), "value": least}):
            is_along = dim == len(reader.shape(value)) - 1 and before >= 0
            return is_along and _counts_from(number_of(least), counts, dim, reader)
    return False


def _counts_from(least: Any, value: Any, dim: int, reader: MaskReader) -> bool:
    """Is ``value`` a cumsum of non-negative steps along ``dim``, and ``least`` a number, no more than any sum?"""
    if not least.is_Integer or least > 0 or not _is_of_integers(value, reader):
        return False
    places = _places(value, reader)
    element = reader.source(value, (*places[:dim], QUERY, *places[dim + 1 :]))
    if not _is_of_integers(element.value, reader):
        return False
    match reader.operators.does(element.value):
        case Call(aten.cumsum, {"self": steps, "dim": along}):
            others = list(element.index)
            is_along = others.pop(along % len(others)) == QUERY and not any(QUERY in i.free_symbols for i in others)
            return is_along and is_non_negative(steps, reader.operators)
    return False


def _is_of_integers(value: Any, reader: MaskReader) -> bool:
    return reader.operators.is_tensor(value) and reader.dtype(value) in INDEX_DTYPES


def _places(value: Value, reader: MaskReader) -> Index:
    """Any element."""
    return tuple(sympy.Dummy(f"index{d}", integer=True, nonnegative=True) for d in range(len(reader.shape(value))))


def _grows(value: Any, dim: int, reader: MaskReader) -> bool:
    """Are the integers of ``value`` proved to grow, or to stay equal, along ``dim``?"""
    if not _is_of_integers(value, reader):
        return False
    places = _places(value, reader)
    vector = over_tokens(reader.read(value, (*places[:dim], QUERY, *places[dim + 1 :])))
    return vector is not None and _Direction(reader, False).of(vector) == 1


def unit_step_vectors(ids: Any, reader: MaskReader) -> list[Any]:
    """Vectors that grow by exactly one from token to token wherever ``ids``, an expression of ``TOKEN``, stays equal.

    ``ids`` is a cumsum of steps. Where it stays equal all steps between are zero (they are non-negative); if a step is
    zero only when ``f(t) - f(t-1) == 1``, then ``f(q) - f(k) == q - k`` for two tokens of one document.
    """
    call = reader.operators.does(reader.leaves.get(getattr(ids.func, "__name__", "")), aten.cumsum)
    if call is None:
        return []
    steps, dim = call.arguments["self"], call.arguments["dim"]
    if ids.args[dim] != TOKEN or not is_non_negative(steps, reader.operators):
        return []
    try:
        stays = sympy.Not(as_boolean(reader.operand(steps, ids.args)))
    except NotAView:
        return []
    found: list[Any] = []
    for condition in sympy.And.make_args(stays):
        if isinstance(condition, sympy.Eq):
            grown = sympy.expand(condition.lhs - condition.rhs)
            found += [v for v in _leaf_calls(grown) if grown in (_step_of(v) - 1, 1 - _step_of(v))]
    return found


def _leaf_calls(expression: Any) -> list[Any]:
    return [call for call in expression.atoms(sympy.core.function.AppliedUndef) if TOKEN in call.args]


def _step_of(vector: Any) -> Any:
    return vector - vector.xreplace({TOKEN: TOKEN - 1})
