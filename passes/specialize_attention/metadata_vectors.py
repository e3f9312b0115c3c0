"""Writes the vectors over tokens that a packed batch's metadata is computed from."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.values import expression, value_in, value_of
from glue_compiler.passes.specialize_attention.documents import BATCH, KEY, TOKEN
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader
from glue_compiler.passes.specialize_attention.metadata_places import COMPARISONS, MetadataPlace, Run, taken_of

_glue = torch.ops.glue


@dataclass
class MetadataVectors:
    """Writes where the graph of ``place`` inserts; what can be written, ``metadata_places`` has decided.

    Attributes:
        results: nodes that have been replaced → what took their place.
        batch, length: numbers, or nodes that hold them.
    """

    make: NodeMaker
    reader: MaskReader
    place: MetadataPlace
    results: Mapping[fx.Node, fx.Node]
    batch: Any
    length: Any
    device: torch.device

    def starts(self, documents: Sequence[Any]) -> fx.Node:
        """bool ``[B, T]``: a document begins at the token. What the first of a row says does not matter."""
        if not documents:
            return self.make.call(torch.zeros, (self.batch, self.length), dtype=torch.bool, device=self.device)
        vectors = [self._vector(vector) for vector in documents]
        starts = functools.reduce(operator.or_, [ids != ids.roll(1, -1) for ids in vectors])
        return starts.expand(self.batch, self.length).node

    def seen(self, keys: Sequence[Any]) -> fx.Node:
        """bool ``[B, T]``: the key may be seen."""
        return self._condition(sympy.And(*keys)).expand(self.batch, self.length).node

    def _condition(self, condition: Any) -> Any:
        """The values of a boolean expression of ``BATCH`` and ``KEY``: ``[B or 1, T or 1]``."""
        if isinstance(condition, sympy.Not):
            return self._condition(condition.args[0]).logical_not()
        if isinstance(condition, sympy.And | sympy.Or):
            combine = operator.and_ if isinstance(condition, sympy.And) else operator.or_
            return functools.reduce(combine, map(self._condition, condition.args))
        return COMPARISONS[condition.func](*map(self._vector, condition.args))

    def _vector(self, vector: Any) -> Any:
        """An expression of ``BATCH`` and ``TOKEN`` or ``KEY``, computed: ``[B or 1, T or 1]``, ``[]``, or a number."""
        if vector.is_number:
            return int(vector)
        if vector in (TOKEN, KEY):
            return self.make.proxy(self.make.call(torch.arange, self.length, device=self.device)).unsqueeze(0)
        if isinstance(vector, sympy.Add | sympy.Mul):
            combine = operator.add if isinstance(vector, sympy.Add) else operator.mul
            return functools.reduce(combine, map(self._wide, vector.args))
        if isinstance(vector, sympy.floor):
            numerator, denominator = sympy.fraction(sympy.together(vector.args[0]))
            return self._wide(numerator) // int(denominator)
        return self._leaf(vector)

    def _wide(self, vector: Any) -> Any:
        """In int64, so that nothing overflows that did not before."""
        found = self._vector(vector)
        is_narrow = isinstance(found, fx.Proxy) and value_of(found.node).dtype != torch.int64
        return found.to(torch.int64) if is_narrow else found

    def _leaf(self, vector: Any) -> Any:
        name = vector.func.__name__
        place = self.place.leaves[name]
        sizes = {BATCH: self.batch, TOKEN: self.length}
        known = {places: expression(value_in(size)) for places, size in sizes.items()}
        taken = taken_of(vector, self.reader.leaf_shape(name), known)
        items = tuple(slice(part.first, part.last) if isinstance(part, Run) else part for part in taken)
        node = self.make.brought_to(self.results.get(place.node, place.node), place.scope, self.place.scope)
        if name in self.reader.documents:
            node = self.make.call(_glue.mask_documents.default, node)
        found = self.make.proxy(node)
        if any(item != slice(0, None) for item in items):
            found = found[items]
        runs = [part for part in taken if isinstance(part, Run)]
        for dim, run in enumerate(runs):
            if not run.has_known_end:
                # A slice would be as long as the shorter of two sizes; this has a size that is known, and the
                # bounds are checked as where the mask was made.
                wanted = self.make.call(torch.arange, sizes[run.places], device=self.device)
                found = found.index_select(dim, wanted)
        if [run.places for run in runs] == [TOKEN, BATCH]:
            found = found.transpose(0, 1)
        if len(runs) == 1:
            found = found.unsqueeze(1 if runs[0].places == BATCH else 0)
        return found
