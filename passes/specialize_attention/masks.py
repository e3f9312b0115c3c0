"""What a mask means: which keys each query sees, proved from the mask's index expression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch

from glue_compiler.fx.index_expressions import Unreadable
from glue_compiler.fx.index_numbers import as_boolean, as_number, holds_where, is_selected_constant
from glue_compiler.fx.index_views import NotAView
from glue_compiler.ops.mask_blocks import hidden_below
from glue_compiler.passes.specialize_attention.attention_parts import Mask
from glue_compiler.passes.specialize_attention.documents import (
    BATCH,
    HEAD,
    KEY,
    QUERY,
    TOKEN,
    is_monotone,
    over_tokens,
    unit_step_vectors,
)
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader


class UnknownMask(Exception):
    """The mask is not proved to be one that a kernel knows; the message says why, and what would change it."""


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: those that pass every condition below. Without ``keys`` every query sees itself.

    Attributes:
        is_causal: ``k <= q``.
        window: -1: any distance; else ``|q - k| < window``.
        documents: vectors over tokens, expressions of ``BATCH`` and ``TOKEN``; query and key are equal in each.
        keys: conditions, expressions of ``BATCH`` and ``KEY``, of the keys that queries see at all, such as padding.
    """

    is_causal: bool = False
    window: int = -1
    documents: tuple[Any, ...] = ()
    keys: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        kind = ("document-" if self.documents else "") + ("causal" if self.is_causal else "bidirectional")
        if not self.documents and not self.is_causal:
            kind = "all"
        padding = " with padding" if self.keys else ""
        return kind + padding + (f", window {self.window}" if self.window > 0 else "")


def classify_mask(mask: Mask, batch: Any, length: Any, reader: MaskReader, *, assume_sorted: bool) -> Visibility:
    """Classify the mask of ``batch`` rows, each with ``length`` queries and as many keys.

    Raises:
        UnknownMask: it is none of those that :class:`Visibility` describes.
    """
    try:
        elements = [(each, _element(each, batch, reader)) for each in mask.parts]
        try:
            visible = sympy.And(*(_shown(each, element, reader) for each, element in elements))
            return _Classifier(visible, length, reader, assume_sorted).run()
        except UnknownMask as reason:
            given = next(filter(None, (_input_matrix(element, reader) for _, element in elements)), None)
            raise UnknownMask(given) if given is not None else reason from None
    except (Unreadable, NotAView) as reason:
        raise UnknownMask(f"{reason}, so its contents are not known") from None


def hidden_number(mask: Mask, batch: Any, reader: MaskReader) -> float:
    """What a mask that :func:`classify_mask` has read adds to the scores of the keys that it hides.

    Raises:
        UnknownMask: one number to some, and another to others.
    """
    hidden = set[Any]()

    def is_shown(number: Any) -> bool:
        hidden.update([number] if number != 0 else [])
        return bool(number == 0)

    holds_where(as_number(_element(mask, batch, reader)), is_shown)
    if len(hidden) != 1:
        raise UnknownMask("it adds more than one number to the scores of hidden keys")
    return float(hidden.pop())


def _element(mask: Mask, batch: Any, reader: MaskReader) -> Any:
    """What the mask holds for a score."""
    rank = reader.operators.rank(mask.value)
    return reader.read(mask.value, (sympy.Integer(0) if batch == 1 else BATCH, HEAD, QUERY, KEY)[4 - rank :])


def _shown(mask: Mask, element: Any, reader: MaskReader) -> Any:
    """The condition under which a query sees a key."""
    visible = _visible(element, mask.factor, reader.operators.dtype(mask.value))
    return sympy.Not(visible) if mask.role == "hides" else visible


def _input_matrix(element: Any, reader: MaskReader) -> str | None:
    """What to say of a mask that reads an input of the graph at query and key."""
    for read in element.atoms(sympy.core.function.AppliedUndef):
        value = reader.leaves[str(read.func)]
        if {QUERY, KEY} <= read.free_symbols and value.node.op == "placeholder":
            return (
                f"the mask is an input of the graph, '{value.node.name}', so its contents are not known; one that the "
                "model computes from positions, lengths or document ids would be specialised"
            )
    return None


def _visible(value: Any, factor: float, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return as_boolean(value)
    if not dtype.is_floating_point:
        raise UnknownMask(f"numbers in {dtype} are added to the scores")
    value = as_number(value)
    if not is_selected_constant(value):
        raise UnknownMask("what is added to the scores is more than 0 or minus infinity")
    # Added to any score that is met in practice, this leaves a weight of exactly zero.
    hides = hidden_below(dtype)

    def is_hidden(number: Any) -> bool:
        return number.is_extended_real is True and bool(number * factor <= hides)

    if holds_where(value, lambda number: number == 0 or is_hidden(number)) != sympy.true:
        raise UnknownMask("what is added to the scores is neither 0 nor below -1e9")
    return holds_where(value, lambda number: number == 0)


class _Classifier:
    def __init__(self, visible: Any, length: Any, reader: MaskReader, assume_sorted: bool) -> None:
        self.visible = sympy.to_nnf(visible, simplify=False)
        self.length = length
        self.reader = reader
        self.assume_sorted = assume_sorted
        self.documents: list[Any] = []
        self.keys: list[Any] = []
        self.unit_steps: list[Any] = []

    def run(self) -> Visibility:
        conditions = sympy.And.make_args(self.visible)
        if self.visible == sympy.false:
            raise UnknownMask("no query sees any key")
        inequalities = []
        for condition in conditions:
            if condition == sympy.true:
                continue
            if self._is_of_keys(condition):
                self.keys.append(condition)
            elif isinstance(condition, sympy.Eq):
                self._equality(condition)
            else:
                inequalities += self._as_non_negative(condition)
        back, ahead = sympy.oo, sympy.oo
        for difference in inequalities:
            kind, limit = self._range(difference)
            if kind == "back":
                back = min(back, limit)
            elif kind == "ahead":
                ahead = min(ahead, limit)
        return self._visibility(back, ahead)

    def _visibility(self, back: Any, ahead: Any) -> Visibility:
        if min(back, ahead) < 0:
            raise UnknownMask("a token does not see itself, so that some rows see nothing")
        if ahead in (0, back):
            window = -1 if back == sympy.oo else int(back) + 1
            return Visibility(ahead == 0, window, tuple(self.documents), tuple(self.keys))
        raise UnknownMask(f"a window of {back} keys back and {ahead} ahead; kernels take both equal, or none ahead")

    @staticmethod
    def _is_of_keys(condition: Any) -> bool:
        """Is it about a key alone, whatever the query, and no range of keys that is known now?"""
        symbols = condition.free_symbols
        is_known_later = bool(condition.atoms(sympy.core.function.AppliedUndef))
        is_range = not is_known_later and not isinstance(condition, sympy.Ne)
        return not is_range and KEY in symbols and symbols <= {BATCH, KEY}

    def _equality(self, condition: Any) -> None:
        difference = sympy.expand(condition.lhs - condition.rhs)
        of_query = sum((term for term in sympy.Add.make_args(difference) if QUERY in term.free_symbols), sympy.S.Zero)
        if of_query.could_extract_minus_sign():
            of_query, difference = -of_query, -difference
        vector = over_tokens(of_query)
        is_difference = KEY not in of_query.free_symbols and HEAD not in of_query.free_symbols
        if not is_difference or sympy.expand(of_query - of_query.xreplace({QUERY: KEY}) - difference) != 0:
            raise UnknownMask(f"{self._show(condition)} does not compare one vector at query and key")
        if vector is None:
            raise UnknownMask(f"{self._show(condition)} treats the first token of a row in its own way")
        if not is_monotone(vector, self.reader, assume_sorted=self.assume_sorted):
            raise UnknownMask(
                f"document ids {self._show(vector)} are not proved to be sorted; ids from a cumsum are, and "
                'options={"assume": {"sorted_document_ids": True}} says it'
            )
        self.documents.append(vector)
        self.unit_steps += unit_step_vectors(vector, self.reader)

    def _as_non_negative(self, condition: Any) -> list[Any]:
        """The condition as expressions that are at least zero, all integers."""
        if not isinstance(condition, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt):
            raise UnknownMask(self._why_not(condition))
        more, less = condition.gts, condition.lts
        difference = sympy.expand(more - less - (1 if condition.func in (sympy.Gt, sympy.Lt) else 0))
        distances = difference.atoms(sympy.Abs)
        if not distances:
            return [difference]
        distance = distances.pop()
        rest = sympy.expand(difference + distance)
        if distances or rest.has(sympy.Abs):
            raise UnknownMask(f"{self._show(condition)} is no bound of one distance")
        return [sympy.expand(rest - distance.args[0]), sympy.expand(rest + distance.args[0])]

    def _why_not(self, condition: Any) -> str:
        shown = self._show(condition)
        if isinstance(condition, sympy.Or):
            return f"it allows one of several conditions, {shown}, as a prefix or a global token does"
        symbols = condition.free_symbols
        if isinstance(condition, sympy.Ne) and not {QUERY, KEY} <= symbols:
            return f"{shown} hides queries, not keys; a mask that hides the same tokens as keys would be specialised"
        if HEAD in symbols:
            return f"{shown} differs from head to head"
        return f"the meaning of {shown} is not known"

    def _range(self, difference: Any) -> tuple[str, Any]:
        """``difference >= 0`` as a limit of how far a query sees ``"back"`` or ``"ahead"``; or ``"always"`` true."""
        for vector in self.unit_steps:
            at_query, at_key = vector.xreplace({TOKEN: QUERY}), vector.xreplace({TOKEN: KEY})
            factor = difference.coeff(at_query)
            if factor in (1, -1) and difference.coeff(at_key) == -factor:
                difference = sympy.expand(difference - factor * (at_query - at_key) + factor * (QUERY - KEY))
        if difference.is_nonnegative or self._least(difference) >= 0:
            return "always", None
        for kind, distance in (("back", QUERY - KEY), ("ahead", KEY - QUERY)):
            limit = sympy.expand(difference + distance)
            if limit.is_Integer:
                return kind, limit
        positions = difference.atoms(sympy.core.function.AppliedUndef)
        if positions:
            raise UnknownMask(
                f"{self._show(difference)} >= 0 compares values that are not proved to grow by one from token to token"
            )
        raise UnknownMask(f"{self._show(difference)} >= 0 is neither causal nor a window")

    def _least(self, difference: Any) -> Any:
        """The least value of a linear expression over all queries and keys; minus infinity if it is not known."""
        linear = sympy.Poly(difference, QUERY, KEY) if difference.is_polynomial(QUERY, KEY) else None
        if linear is None or linear.total_degree() > 1 or not all(factor.is_number for factor in linear.coeffs()):
            return -sympy.oo
        if not isinstance(self.length, int):
            return -sympy.oo
        ends = (0, self.length - 1)
        return min(difference.subs({QUERY: q, KEY: k}) for q in ends for k in ends)

    def _show(self, expression: Any) -> str:
        text = str(expression)
        for name, value in self.reader.leaves.items():
            text = text.replace(f"{name}(", f"{value.node.name}(")
        return text
