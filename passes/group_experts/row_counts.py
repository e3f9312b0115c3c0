"""What is known of a vector of row counts: how many rows they count together. Read from data flow; changes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from glue_compiler.fx.operators import Call, Value
from glue_compiler.passes.group_experts.copies import Fill, copied_from, fill_of
from glue_compiler.passes.group_experts.row_sets import COUNT_DTYPES, SLOT, TOKEN, RowSets, counts_by_expert
from glue_compiler.passes.group_experts.selected_experts import are_distinct

aten = torch.ops.aten


@dataclass(frozen=True)
class Total:
    """The counts are not negative, and their sum is ``rows``, or at most that if not ``exact``."""

    rows: Any
    """A sympy expression."""
    exact: bool


class RowCounts:
    """Reads vectors of counts."""

    def __init__(self, sets: RowSets) -> None:
        self._sets = sets
        self._operators = sets.operators

    def total(self, vector: Value) -> Total | None:
        """None if nothing is known."""
        value: Value | None = vector
        # A cast to a narrower dtype on the way would round or wrap.
        while value is not None and self._operators.meta(value).dtype in COUNT_DTYPES:
            found = self._total(value)
            if found is not None:
                return found
            value = copied_from(self._operators, value)
        return None

    def _total(self, value: Value) -> Total | None:
        match self._operators.does(value):
            case Call(aten.sum):
                return self._total_of_sum(value)
            case Call(aten.histc, {"self": ids, "bins": int()}):
                # Whatever the bins are, each number is in one of them or in none.
                return Total(self._numel(ids), exact=False)
            case Call(aten.scatter_add | aten.scatter_add_, {"self": base, "dim": 0 | -1, "index": ids, "src": ones}):
                return self._total_of_ones(base, ids, ones)
            case Call(
                aten.index_add | aten.index_add_,
                {"self": base, "dim": 0 | -1, "index": ids, "source": ones, "alpha": 1},
            ):
                return self._total_of_ones(base, ids, ones)
        return None

    def _total_of_ones(self, base: Any, ids: Any, ones: Any) -> Total | None:
        """A one added to zeros for each id."""
        if self._fill(base) is not Fill.ZEROS or self._fill(ones) is not Fill.ONES or not isinstance(ids, Value):
            return None
        metas = [self._operators.meta(value) for value in (ids, ones)]
        same = metas[0].rank == 1 and metas[0].shape == metas[1].shape
        return Total(self._numel(ids), exact=True) if same else None

    def _total_of_sum(self, total: Value) -> Total | None:
        mask = counts_by_expert(total, self._sets)
        if mask is not None:
            # one_hot refuses ids that have no class, so each slot is counted once, unless slots were merged before.
            exact = sum(axis in (TOKEN, SLOT) for axis in mask.axes) == self._operators.meta(mask.selected).rank
            return Total(self._numel(mask.selected), exact) if mask.classes is not None else None
        match self._operators.does(total):
            case Call(aten.sum, {"self": Value() as counted, "dim": (0 | -2,), "keepdim": False}):
                pass
            case _:
                return None
        while (source := copied_from(self._operators, counted)) is not None:
            counted = source
        return self._total_of_scatter(counted) if self._operators.meta(counted).rank == 2 else None

    def _total_of_scatter(self, value: Value) -> Total | None:
        """``zeros([tokens, E]).scatter(1, ids, 1)``: a token counts once for each expert that its slots name."""
        call = self._operators.does(value)
        if call is None or call.overload not in (aten.scatter.value, aten.scatter_.value):
            return None
        base, ids, given = call.arguments["self"], call.arguments["index"], call.arguments
        if given["dim"] not in (1, -1) or given["value"] != 1 or not isinstance(ids, Value):
            return None
        if self._operators.meta(ids).rank != 2 or self._fill(base) is not Fill.ZEROS:
            return None
        return Total(self._numel(ids), exact=are_distinct(self._operators, ids))

    def _fill(self, value: Any) -> Fill | None:
        return fill_of(self._operators, value)

    def _numel(self, value: Value) -> Any:
        return math.prod(self._operators.meta(value).shape)
