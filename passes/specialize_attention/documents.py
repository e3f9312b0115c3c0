"""Lemmas about per-token vectors: which are constant on contiguous runs of tokens, and which grow by one on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.index_expressions import IndexReader, as_boolean
from glue_compiler.fx.index_views import Index, NotAView, argument, operator_name, shape_of
from glue_compiler.fx.values import value_of

BATCH, HEAD, QUERY, KEY = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "bhqk")
TOKEN = sympy.Symbol("t", integer=True, positive=True)
"""A token that is not the first of its row."""

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Monotone:
    """A vector that never decreases (or never increases) from a token to the next; ``because`` names the lemmas.

    Its runs of equal values are contiguous, so tokens with equal values are a document.
    """

    because: tuple[str, ...]


def monotone(vector: Any, reader: IndexReader, *, assume_sorted: bool) -> Monotone | None:
    """Is ``vector``, an expression of ``TOKEN``, proved monotone? ``assume_sorted``: integer leaves are taken to be."""
    direction = _Direction(reader, assume_sorted)
    found = direction.of(vector)
    return Monotone(tuple(dict.fromkeys(direction.because))) if found is not None else None


class _Direction:
    def __init__(self, reader: IndexReader, assume_sorted: bool) -> None:
        self.reader = reader
        self.assume_sorted = assume_sorted
        self.because: list[str] = []

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
        node = self.reader.leaves.get(getattr(vector.func, "__name__", ""))
        return self._of_leaf(node, vector.args) if node is not None else None

    def _of_leaf(self, node: fx.Node, index: Index) -> int | None:
        along = [dim for dim, i in enumerate(index) if TOKEN in i.free_symbols]
        if len(along) != 1 or index[along[0]] not in (TOKEN, TOKEN - 1):
            return None
        lemma = _never_decreases(node, along[0], self.reader)
        if lemma is None and self.assume_sorted and value_of(node).dtype in _INTEGERS:
            lemma = "assumed: document ids are sorted"
        if lemma is None:
            return None
        self.because.append(lemma)
        return 1


def _never_decreases(node: fx.Node, dim: int, reader: IndexReader) -> str | None:
    if value_of(node).dtype not in _INTEGERS or not reader.is_pure(node):
        return None
    name = operator_name(node)
    if name == "cumsum" and argument(node, 1, "dim") in (dim, dim - len(shape_of(node))):
        return "a cumsum of non-negative steps" if _is_non_negative(node.args[0]) else None
    if name in ("searchsorted", "bucketize"):
        values = node.args[1] if name == "searchsorted" else node.args[0]
        boundaries = node.args[0] if name == "searchsorted" else node.args[1]
        is_vector = isinstance(boundaries, fx.Node) and len(shape_of(boundaries)) == 1
        # Each comparison of a binary search goes to the right for a larger value too, sorted boundaries or not.
        if is_vector and "sorter" not in node.kwargs and _index_never_decreases(values, dim, reader):
            return "a binary search for growing values"
    if name == "repeat_interleave" and isinstance(node.args[0], fx.Node):
        along = argument(node, 2, "dim")
        flat = len(shape_of(node.args[0])) == 1
        if flat and along in (None, 0, -1) and _index_never_decreases(node.args[0], 0, reader):
            return "repeat_interleave of growing values"
    return None


def _index_never_decreases(node: Any, dim: int, reader: IndexReader) -> bool:
    if not isinstance(node, fx.Node) or value_of(node).dtype not in _INTEGERS:
        return False
    anywhere = [sympy.Dummy(f"index{d}", integer=True, nonnegative=True) for d in range(len(shape_of(node)))]
    index = (*anywhere[:dim], TOKEN, *anywhere[dim + 1 :])
    return _Direction(reader, False).of(reader.read(node, index)) == 1


def _is_non_negative(node: Any) -> bool:
    """Booleans, and integers that were booleans."""
    while isinstance(node, fx.Node) and isinstance(value_of(node), torch.Tensor):
        if value_of(node).dtype == torch.bool:
            return True
        if operator_name(node) not in ("to", "int", "long", "type") or value_of(node).dtype not in _INTEGERS:
            return False
        node = node.args[0]
    return False


def unit_step_vectors(ids: Any, reader: IndexReader) -> list[Any]:
    """Vectors that grow by exactly one from token to token wherever ``ids``, an expression of ``TOKEN``, stays equal.

    ``ids`` is a cumsum of steps. Where it stays equal all steps between are zero (they are non-negative); if a step is
    zero only when ``f(t) - f(t-1) == 1``, then ``f(q) - f(k) == q - k`` for two tokens of one document.
    """
    node = reader.leaves.get(getattr(ids.func, "__name__", ""))
    if node is None or not reader.is_pure(node) or operator_name(node) != "cumsum":
        return []
    dim = argument(node, 1, "dim")
    if not isinstance(dim, int) or ids.args[dim] != TOKEN or not _is_non_negative(node.args[0]):
        return []
    try:
        stays = sympy.Not(as_boolean(reader.operand(node.args[0], ids.args)))
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
