"""The numbers that a loop over pieces is written with: what they are read from, and which of them only it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.effects import Effects, Kind
from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.group_experts.boundaries import Boundaries, Boundary
from glue_compiler.passes.group_experts.pieces import Piece


class SegmentNumbers:
    """``vector``: of row counts; ``rows``: a sympy expression, their sum, or its bound if not ``exact``."""

    def __init__(
        self,
        boundaries: Boundaries,
        effects: dict[fx.Node, Effects],
        vector: fx.Node,
        rows: Any,
        exact: bool,
    ) -> None:
        self._boundaries = boundaries
        self._effects = effects
        self._vector = vector
        self._experts = value_of(vector).shape[0]
        self._rows = rows
        self._exact = exact
        self._count_symbols: dict[int, Any] = {}
        self._meaning: dict[Any, Any] = {}
        self._not_negative: set[Any] = set()

    def trail(self, read: Iterable[fx.Node]) -> set[fx.Node]:
        """``read`` and all that lies between them and the counts, which are in it too."""
        found = {self._vector}
        waiting = list(read)
        while waiting:
            node = waiting.pop()
            if node in found or not self._is_a_sum(node):
                continue
            found.add(node)
            self._learn(node)
            waiting += node.all_input_nodes
        return found

    def _is_a_sum(self, node: fx.Node) -> bool:
        """Of items of the counts, or a vector of such sums."""
        items = self._boundaries.items(node)
        sums = items if items is not None else [self._boundaries.of(node)]
        # The counts themselves, under another name, are where the trail ends.
        if items is not None and node is not self._vector and self._boundaries.holds_its_own(node):
            return False
        return all(each is not None for each in sums)

    def dead_ends(self, starts: Collection[fx.Node], pieces: Collection[Piece]) -> set[fx.Node]:
        """What is computed from ``starts`` and has no effect: values without users, and checks that cannot fail."""
        for node in starts:
            self._learn(node)
        for piece in pieces:
            size = expression(value_of(piece.node).shape[0])
            start, stop = piece.extent
            if isinstance(size, sympy.Symbol):
                self._meaning[size] = self._in_counts(stop.plus(start, -1))
        known: dict[fx.Node, bool] = {}
        found: set[fx.Node] = set()
        for start_node in starts:
            for user in start_node.users:
                if user not in starts and self._has_no_effect(user, known):
                    found.add(user)
        waiting = list(found)
        while waiting:
            new = [user for user in waiting.pop().users if user not in found]
            found.update(new)
            waiting += new
        return found

    def _has_no_effect(self, node: fx.Node, known: dict[fx.Node, bool]) -> bool:
        if node not in known:
            effects = self._effects[node]
            self._learn(node)
            if effects.kind is Kind.ASSERT:
                known[node] = self._cannot_fail(node.args[0] if node.args else None)
            else:
                pure = effects.kind is Kind.PURE and not effects.writes
                known[node] = pure and all(self._has_no_effect(user, known) for user in node.users)
        return known[node]

    # -- checks

    def _learn(self, node: fx.Node) -> None:
        """What the symbol of a number stands for."""
        symbol = expression(value_of(node))
        if not isinstance(symbol, sympy.Symbol):
            return
        if node.target is torch.ops.aten.sym_storage_offset.default:
            self._not_negative.add(symbol)
        elif (boundary := self._boundaries.of(node)) is not None:
            self._meaning[symbol] = self._in_counts(boundary)

    def _in_counts(self, boundary: Boundary) -> Any:
        """A sympy expression in one symbol for each count."""
        return boundary.constant + sum(times * self._count(index) for (_, index), times in boundary.items)

    def _count(self, index: int) -> Any:
        return self._count_symbols.setdefault(index, sympy.Dummy(f"count_{index}", integer=True))

    def _cannot_fail(self, check: Any) -> bool:
        """Is it a comparison that holds for any counts that are not negative and sum to the rows?"""
        holds = expression(value_of(check)) if isinstance(check, fx.Node) else check
        if holds is True or holds is sympy.true:
            return True
        if isinstance(holds, sympy.Ge):
            return self._is_not_negative(holds.lhs - holds.rhs)
        if isinstance(holds, sympy.Le):
            return self._is_not_negative(holds.rhs - holds.lhs)
        if isinstance(holds, sympy.Eq):
            difference = holds.lhs - holds.rhs
            return self._is_not_negative(difference) and self._is_not_negative(-difference)
        return False

    def _is_not_negative(self, number: Any) -> bool:
        counts = [self._count(i) for i in range(self._experts)]
        number = sympy.expand(sympy.sympify(number).xreplace(self._meaning))
        if self._exact:
            *counts, last = counts
            number = sympy.expand(number.xreplace({last: self._rows - sum(counts)}))
        # What the counts leave of the rows is the last count, or not known, and in both cases not negative.
        slack = self._rows - sum(counts)
        symbols = (*counts, *self._not_negative)
        for times in (0, 1):
            left = sympy.expand(number - times * slack)
            rest = left.xreplace(dict.fromkeys(symbols, sympy.S.Zero))
            linear = sympy.expand(left - rest - sum(left.coeff(symbol) * symbol for symbol in symbols)) == 0
            factors = [left.coeff(symbol) for symbol in symbols]
            if linear and rest.is_number and rest >= 0 and all(each.is_number and each >= 0 for each in factors):
                return True
        return False
