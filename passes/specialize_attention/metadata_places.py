"""Where the metadata of a packed batch is computed, and from which nodes: decided before anything is written."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import fx

from glue_compiler.fx.value_numbering import Numbering, Scope
from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.specialize_attention.attention_parts import AttentionSite
from glue_compiler.passes.specialize_attention.documents import BATCH, KEY, TOKEN
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader
from glue_compiler.passes.specialize_attention.masks import UnknownMask, Visibility

COMPARISONS: dict[Any, Callable[..., Any]] = {
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
}


@dataclass(frozen=True)
class LeafPlace:
    """``node`` of ``scope`` holds the elements of a leaf."""

    scope: Scope
    node: fx.Node


@dataclass(frozen=True)
class MetadataPlace:
    """The metadata is computed in ``scope``, before the node ``before``.

    Attributes:
        leaves: by their names in the vectors, each in ``scope`` or around it.
        batch, length: numbers, or nodes of ``scope`` that hold them; None: to be taken from the query.
    """

    scope: Scope
    before: fx.Node
    leaves: Mapping[str, LeafPlace]
    batch: int | fx.Node | None
    length: int | fx.Node | None


def metadata_place(site: AttentionSite, visibility: Visibility, reader: MaskReader) -> MetadataPlace:
    """The outermost graph around the site in which everything is known.

    Raises:
        UnknownMask: there is none, or a vector cannot be computed.
    """
    sizes = {BATCH: value_of(site.query).shape[0], TOKEN: value_of(site.query).shape[2]}
    sizes = {symbol: expression(size) for symbol, size in sizes.items()}
    vectors = (*visibility.documents, *visibility.keys)
    for vector in vectors:
        _require_computable(vector, sizes, reader)
    names = sorted({call.func.__name__ for vector in vectors for call in vector.atoms(AppliedUndef)})
    path = [site.scope]
    while path[0].parent is not None:
        path.insert(0, path[0].parent)
    for scope in path:
        found = _place_in(scope, site, names, reader)
        if found is not None:
            return found
    raise UnknownMask(f"the mask is {visibility.name}, but what it is made from is not at hand where it is needed")


def _place_in(scope: Scope, site: AttentionSite, names: list[str], reader: MaskReader) -> MetadataPlace | None:
    numbering = reader.operators.numbering
    before = anchor(site.output, site.scope, scope)
    leaves = {name: _leaf_place(name, scope, before, reader) for name in names}
    batch, length = (_size(site, scope, dim, before, numbering) for dim in (0, 2))
    known = {name: place for name, place in leaves.items() if place is not None}
    if len(known) < len(leaves) or (scope is not site.scope and None in (batch, length)):
        return None
    return MetadataPlace(scope, before, known, batch, length)


def anchor(node: fx.Node, inner: Scope, outer: Scope) -> fx.Node:
    """The node of ``outer`` before which a value is ready for ``node`` of ``inner``."""
    while inner is not outer:
        assert inner.call is not None
        assert inner.parent is not None
        node, inner = inner.call.node, inner.parent
    return node


def _leaf_place(name: str, scope: Scope, before: fx.Node, reader: MaskReader) -> LeafPlace | None:
    numbering = reader.operators.numbering
    number: Any = reader.operators.number(reader.leaves[name])
    around: Scope | None = scope
    while around is not None:
        for occurrence in numbering.occurrences.get(number, ()):
            node = occurrence.node
            is_ready = occurrence.scope is around and occurrence.time < numbering.starts[before]
            if is_ready and numbering.is_kept(node, before):
                return LeafPlace(around, node)
        around = around.parent
    return None


def _size(site: AttentionSite, scope: Scope, dim: int, before: fx.Node, numbering: Numbering) -> Any:
    """A size of the query as a number, or a node of ``scope``; None if ``scope`` has no node that holds it."""
    size = value_of(site.query).shape[dim]
    if isinstance(size, int):
        return size
    for node in scope.graph.nodes:
        if node is before:
            return None
        if isinstance(value_of(node), torch.SymInt) and expression(value_of(node)) == expression(size):
            return node
    return None


# -- what can be written


_COMPUTED = (sympy.Not, sympy.And, sympy.Or, sympy.Add, sympy.Mul, *COMPARISONS)


def _require_computable(whole: Any, sizes: Mapping[Any, Any], reader: MaskReader) -> None:
    """Of a vector over tokens, or a condition of keys."""
    parts = sympy.preorder_traversal(whole)
    for part in parts:
        if isinstance(part, AppliedUndef):
            taken_of(part, reader.leaf_shape(part.func.__name__), sizes)
            parts.skip()
        elif isinstance(part, sympy.floor):
            numerator, denominator = sympy.fraction(sympy.together(part.args[0]))
            if not denominator.is_Integer or denominator <= 0:
                raise UnknownMask(f"{part} is no vector over tokens that can be computed")
            _require_computable(numerator, sizes, reader)
            parts.skip()
        elif not (part.is_Integer or part in (TOKEN, KEY) or isinstance(part, _COMPUTED)):
            raise UnknownMask(f"{whole} is no vector over tokens, and no condition of keys, that can be computed")


@dataclass(frozen=True)
class Run:
    """Consecutive indices of a dimension, one for each row or token; ``places``: BATCH, or TOKEN for tokens and keys.

    Attributes:
        last: as in a slice; None for all up to the end.
        has_known_end: that slice has as many elements as there are places. Else one of them may be longer.
    """

    places: Any
    first: int
    last: int | None
    has_known_end: bool


def taken_of(vector: AppliedUndef, shape: tuple[Any, ...], sizes: Mapping[Any, Any]) -> tuple[int | Run, ...]:
    """Which part of a leaf of ``shape`` a vector is: an index or a run of each dimension.

    ``sizes``: of BATCH and TOKEN.

    Raises:
        UnknownMask: it is no such part.
    """
    parts: list[int | Run] = []
    seen: set[Any] = set()
    for index, size in zip(vector.args, shape, strict=True):
        if index.is_Integer:
            parts.append(int(index))
            continue
        symbols = index.free_symbols
        places = BATCH if symbols == {BATCH} else TOKEN
        first = index - next(iter(symbols))
        if len(symbols) != 1 or symbols - {BATCH, TOKEN, KEY} or not first.is_Integer or first < 0 or places in seen:
            raise UnknownMask(f"{vector} is no vector over tokens that can be computed")
        seen.add(places)
        number = sizes[places]
        if size - first == number:
            parts.append(Run(places, int(first), None, True))
        elif isinstance(size, int) and isinstance(number, int):
            parts.append(Run(places, int(first), int(first) + number, True))
        else:
            # Such as a mask beside the tokens, each with a symbol of its own for the number of rows.
            parts.append(Run(places, int(first), None, False))
    return tuple(parts)
