"""Where the tokens of a batch are in the dimensions of a value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from glue_compiler.fx.flow import Refused


@dataclass(frozen=True)
class Rows:
    """The rows of a batch, in a part of a dimension. There is none where a batch has one row."""

    size: Any


@dataclass(frozen=True)
class Span:
    """The tokens ``start`` to ``start + size`` of each row, in a part of a dimension."""

    start: Any
    size: Any


Part = Any
"""``Rows``, ``Span``, or the size of something else."""
Dim = tuple[Part, ...]
"""What one dimension is the product of, outermost first; parts of size 1 are left out."""


@dataclass(frozen=True)
class Tokens:
    """A value that holds for each token what was computed from values of this token, and from what is no token's.

    *Taken* it has as many ``Rows`` as tokens count, whatever the span, and a ``Span`` of size 1; without ``Rows`` a
    span of so many. (No stride depends on the size of the first dimension; Inductor fails on some that nobody knows.)

    Attributes:
        dims: of the value, in order.
        is_zero: it holds zeros for tokens that are hidden, in eager too.
    """

    dims: tuple[Dim, ...]
    is_zero: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for dim in self.dims for part in dim)

    @property
    def span(self) -> Span:
        return next(part for part in self.parts if isinstance(part, Span))

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(size_of(dim) for dim in self.dims)

    @property
    def is_split(self) -> bool:
        """Is each dimension one part? Others are viewed as their parts to take tokens, and to put them back."""
        return all(len(dim) == 1 for dim in self.dims)

    def holds(self, dim: int) -> bool:
        """Are tokens, or rows of the batch, in this dimension?"""
        return any(is_token(part) for part in self.dims[dim])

    def with_dims(self, dims: Iterable[Dim]) -> Tokens:
        return replace(self, dims=tuple(dims))

    def resized(self, shape: Any) -> Tokens:
        """Of a value with the same tokens, and with the sizes of ``shape`` in dimensions that hold none."""
        return Tokens(tuple(dim if self.holds(i) else plain(shape[i]) for i, dim in enumerate(self.dims)))


def counted_part(tokens: Tokens) -> Part:
    """Which part becomes the tokens that count."""
    return next((part for part in tokens.parts if isinstance(part, Rows)), tokens.span)


def is_token(part: Part) -> bool:
    return isinstance(part, Rows | Span)


def size_of_part(part: Part) -> Any:
    return part.size if is_token(part) else part


def size_of(dim: Dim) -> Any:
    return math.prod(map(size_of_part, dim))


def plain(size: Any) -> Dim:
    """A dimension without tokens."""
    return () if size == 1 else (size,)


def behind(span: Span, length: Any) -> int | None:
    """How many of the ``length`` tokens of a row are behind a span of them; None if that is not known."""
    number = sympy.expand(length - span.start - span.size)
    return int(number) if number.is_Integer else None


def symbols_in(sizes: Iterable[Any]) -> set[sympy.Symbol]:
    return {symbol for size in sizes for symbol in getattr(size, "free_symbols", ())}


def is_equal(first: Any, second: Any) -> bool:
    return first == second or sympy.expand(first - second) == 0


def regrouped(tokens: Tokens, shape: Sequence[Any]) -> Tokens | None:
    """The same elements in the same order as a tensor of ``shape``; None if a dimension takes a part of the tokens."""
    left = list(tokens.parts)
    dims: list[Dim] = []
    for size in shape:
        dim: list[Part] = []
        while not is_equal(size, 1):
            if not left:
                return None
            part = left.pop(0)
            if (rest := _quotient(size, size_of_part(part))) is not None:
                dim.append(part)
                size = rest
            elif not is_token(part) and (rest := _quotient(part, size)) is not None:
                dim.append(size)
                left.insert(0, rest)
                break
            else:
                return None
        dims.append(tuple(dim))
    return None if left else tokens.with_dims(dims)


def _quotient(number: Any, divisor: Any) -> Any | None:
    """None: it is not known to be a whole number."""
    if isinstance(number, int) and isinstance(divisor, int):
        return number // divisor if number % divisor == 0 else None
    quotient = sympy.cancel(sympy.sympify(number) / divisor)
    if quotient.is_Integer:
        return int(quotient)
    return quotient if sympy.fraction(quotient)[1] == 1 and quotient.is_polynomial() else None


def broadcast(found: Sequence[Tokens], rank: int) -> list[Dim]:
    """The dims that hold tokens of what values are broadcast to; of the others ``()``.

    Raises:
        Refused: they do not agree.
    """
    disagreement = Refused("its operands have tokens in different dimensions")
    result: list[Dim] = [()] * rank
    for tokens in found:
        for place, dim in enumerate(tokens.dims, rank - len(tokens.dims)):
            if any(map(is_token, dim)):
                if result[place] not in ((), dim):
                    raise disagreement
                result[place] = dim
    parts = [part for dim in result for part in dim if is_token(part)]
    is_of_all = all({part for part in each.parts if is_token(part)} == set(parts) for each in found)
    if not is_of_all or len(set(parts)) != len(parts):
        raise disagreement
    return result
