"""Masks that a graph is given, read as what is known of them."""

from __future__ import annotations

from typing import Any

import sympy
from torch import fx

from glue_compiler.fx.index_expressions import IndexReader
from glue_compiler.fx.index_numbers import Expression, as_boolean
from glue_compiler.fx.index_views import Index
from glue_compiler.fx.operators import OWN, Operators, Value
from glue_compiler.ops.known_masks import KNOWN, SEEN, MaskKind


class MaskReader(IndexReader):
    """Reads an element of a mask that the graph is given as what is known of it.

    Attributes:
        asked: inputs that may be masks, and were looked at.
        documents: leaves that are the numbers of a mask's documents, by name, not its elements.
    """

    def __init__(self, operators: Operators) -> None:
        super().__init__(operators)
        self.asked: dict[fx.Node, None] = {}
        self.documents: set[str] = set()

    def leaf(self, value: Value, index: Index) -> Expression:
        if value.step != OWN or KNOWN not in value.node.meta:
            return super().leaf(value, index)
        self.asked[value.node] = None
        kind = value.node.meta[KNOWN]
        return super().leaf(value, index) if kind is None else self._shown(kind, value, index)

    def _shown(self, kind: MaskKind, value: Value, index: Index) -> Expression:
        query, key = index[-2:]
        conditions = [key <= query] if kind.is_causal else []
        if kind.window > 0:
            conditions += [query - key < kind.window, key - query < kind.window]
        if kind.has_documents:
            conditions.append(sympy.Eq(self._document(value, index, query), self._document(value, index, key)))
        if kind.has_padding:
            conditions.append(as_boolean(self.read(Value(value.node.meta[SEEN]), (index[0], key))))
        shown = sympy.And(*conditions)
        return shown if kind.hidden is None else sympy.Piecewise((0, shown), (sympy.Float(kind.hidden), True))

    def _document(self, value: Value, index: Index, token: Any) -> Any:
        name = f"value{self.operators.number(value)}documents"
        self.leaves[name], self.largest[name] = value, 2**30
        self.documents.add(name)
        return sympy.Function(name, integer=True)(*index[:-3], token)

    def leaf_shape(self, name: str) -> tuple[Any, ...]:
        """Sizes of what the indices of a leaf are of."""
        shape = self.shape(self.leaves[name])
        return (*shape[:-3], shape[-1]) if name in self.documents else shape
