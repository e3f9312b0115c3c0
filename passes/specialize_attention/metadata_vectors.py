"""Writes the vectors over tokens that a packed batch's metadata is computed from."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.index_expressions import IndexReader
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.specialize_attention.documents import BATCH, KEY, TOKEN
from glue_compiler.passes.specialize_attention.metadata_places import MetadataPlace, Run, taken_of

_COMPARISONS: dict[Any, Callable[..., Any]] = {
    sympy.Eq: torch.eq,
    sympy.Ne: torch.ne,
    sympy.Lt: torch.lt,
    sympy.Le: torch.le,
    sympy.Gt: torch.gt,
    sympy.Ge: torch.ge,
}
_MIRRORED = {
    torch.eq: torch.eq,
    torch.ne: torch.ne,
    torch.lt: torch.gt,
    torch.le: torch.ge,
    torch.gt: torch.lt,
    torch.ge: torch.le,
}


@dataclass
class MetadataVectors:
    """Writes where the graph of ``place`` inserts; what can be written, ``metadata_places`` has decided.

    Attributes:
        results: nodes that have been replaced → what took their place.
        batch, length: numbers, or nodes that hold them.
    """

    make: NodeMaker
    reader: IndexReader
    place: MetadataPlace
    results: Mapping[fx.Node, fx.Node]
    batch: Any
    length: Any
    device: torch.device

    @property
    def graph(self) -> fx.Graph:
        return self.place.scope.module.graph

    def starts(self, documents: Sequence[Any]) -> fx.Node:
        """bool ``[B, T]``: a document begins at the token. What the first of a row says does not matter."""
        starts = None
        for vector in documents:
            ids = self._vector(vector)
            previous = self._call(torch.roll, ids, 1, -1)
            differs = self._call(torch.ne, ids, previous)
            starts = differs if starts is None else self._call(torch.logical_or, starts, differs)
        if starts is None:
            size = (self.batch, self.length)
            return self.make.call(self.graph, torch.zeros, size, dtype=torch.bool, device=self.device)
        return self.make.method(self.graph, "expand", starts, self.batch, self.length)

    def seen(self, keys: Sequence[Any]) -> fx.Node:
        """bool ``[B, T]``: the key may be seen."""
        seen = self._condition(sympy.And(*keys))
        return self.make.method(self.graph, "expand", seen, self.batch, self.length)

    def _condition(self, condition: Any) -> fx.Node:
        """The values of a boolean expression of ``BATCH`` and ``KEY``: ``[B or 1, T or 1]``."""
        if isinstance(condition, sympy.Not):
            return self._call(torch.logical_not, self._condition(condition.args[0]))
        if isinstance(condition, sympy.And | sympy.Or):
            combine = torch.logical_and if isinstance(condition, sympy.And) else torch.logical_or
            found, *rest = (self._condition(part) for part in condition.args)
            for part in rest:
                found = self._call(combine, found, part)
            return found
        compare = _COMPARISONS[condition.func]
        sides = [self._vector(side) for side in condition.args]
        if not isinstance(sides[0], fx.Node):
            sides, compare = sides[::-1], _MIRRORED[compare]
        return self._call(compare, *sides)

    def _vector(self, vector: Any) -> Any:
        """An expression of ``BATCH`` and ``TOKEN`` or ``KEY``, computed: ``[B or 1, T or 1]``, ``[]``, or a number."""
        if vector.is_number:
            return int(vector)
        if vector in (TOKEN, KEY):
            tokens = self.make.call(self.graph, torch.arange, self.length, device=self.device)
            return self.make.method(self.graph, "unsqueeze", tokens, 0)
        if isinstance(vector, sympy.Add | sympy.Mul):
            combine = torch.add if isinstance(vector, sympy.Add) else torch.mul
            terms = [self._wide(self._vector(term)) for term in vector.args]
            terms.sort(key=lambda term: not isinstance(term, fx.Node))
            found = terms[0]
            for term in terms[1:]:
                found = self._call(combine, found, term)
            return found
        if isinstance(vector, sympy.floor):
            numerator, denominator = sympy.fraction(sympy.together(vector.args[0]))
            return self._call(torch.floor_divide, self._wide(self._vector(numerator)), int(denominator))
        return self._leaf(vector)

    def _wide(self, vector: Any) -> Any:
        """In int64, so that nothing overflows that did not before."""
        is_narrow = isinstance(vector, fx.Node) and value_of(vector).dtype != torch.int64
        return self.make.method(self.graph, "to", vector, torch.int64) if is_narrow else vector

    def _leaf(self, vector: Any) -> fx.Node:
        name = vector.func.__name__
        place = self.place.leaves[name]
        sizes = {BATCH: self.batch, TOKEN: self.length}
        known = {
            places: expression(value_of(size)) if isinstance(size, fx.Node) else size for places, size in sizes.items()
        }
        taken = taken_of(vector, self.reader.shape(self.reader.leaves[name]), known)
        items = tuple(slice(part.first, part.last) if isinstance(part, Run) else part for part in taken)
        node = self.make.brought_to(self.results.get(place.node, place.node), place.scope, self.place.scope)
        if any(item != slice(0, None) for item in items):
            node = self._call(operator.getitem, node, items)
        runs = [part for part in taken if isinstance(part, Run)]
        for dim, run in enumerate(runs):
            if not run.has_known_end:
                # A slice would be as long as the shorter of two sizes; this has a size that is known, and the
                # bounds are checked as where the mask was made.
                wanted = self.make.call(self.graph, torch.arange, sizes[run.places], device=self.device)
                node = self._call(torch.index_select, node, dim, wanted)
        if [run.places for run in runs] == [TOKEN, BATCH]:
            node = self.make.method(self.graph, "transpose", node, 0, 1)
        if len(runs) == 1:
            node = self.make.method(self.graph, "unsqueeze", node, 1 if runs[0].places == BATCH else 0)
        return node

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self.make.call(self.graph, target, *args)
