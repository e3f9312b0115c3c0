"""What is known of a vector of row counts: how many rows they count together. Read from data flow; changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.effects import Effects
from glue_compiler.fx.spellings import ONES, SUM, ZEROS
from glue_compiler.fx.values import expression, storage_of, value_of
from glue_compiler.passes.group_experts.boundaries import copied_from
from glue_compiler.passes.group_experts.row_sets import COUNT_DTYPES, SLOT, TOKEN, RowSets, counts_by_expert
from glue_compiler.passes.group_experts.selected_experts import are_distinct

_SCATTER = {torch.scatter, "scatter", "scatter_"}
_SCATTER_ADD = {torch.scatter_add, "scatter_add", "scatter_add_", torch.index_add, "index_add", "index_add_"}


@dataclass(frozen=True)
class Total:
    """The counts are not negative, and their sum is ``rows``, or at most that if not ``exact``."""

    rows: Any
    """A sympy expression."""
    exact: bool


class RowCounts:
    """Reads vectors of counts."""

    def __init__(self, nodes: Sequence[fx.Node], effects: dict[fx.Node, Effects]) -> None:
        self._nodes = nodes
        self._effects = effects
        self._position = {node: i for i, node in enumerate(nodes)}

    def total(self, vector: fx.Node) -> Total | None:
        """None if nothing is known."""
        node: fx.Node | None = vector
        while node is not None:
            made = self._contents(node, vector)
            if made is None:
                return None
            found = self._total(made)
            if found is not None:
                return found
            node = copied_from(node)
        return None

    def _total(self, node: fx.Node) -> Total | None:
        if node.target in SUM:
            return self._total_of_sum(node)
        if node.target is torch.histc:
            bins = {"bins": 100, "min": 0, "max": 0, **dict(zip(("bins", "min", "max"), node.args[1:], strict=False))}
            bins |= node.kwargs
            ids: Any = node.args[0]
            # Whatever the bins are, each number is in one of them or in none.
            return Total(_numel(ids), exact=False) if isinstance(bins["bins"], int) else None
        if node.target in _SCATTER_ADD and len(node.args) == 4 and not node.kwargs:
            base, dim, ids, source = node.args
            if dim in (0, -1) and _is_made_of(source, ONES) and _rank(ids) == 1 and self._is_zeros(base, node):
                same = expression(value_of(source).shape[0]) == _numel(ids)  # type: ignore[arg-type]
                return Total(_numel(ids), exact=True) if same else None
        return None

    def _total_of_sum(self, node: fx.Node) -> Total | None:
        mask = counts_by_expert(node, RowSets())
        if mask is not None:
            # one_hot refuses ids that have no class, so each slot is counted once, unless slots were merged before.
            exact = sum(axis in (TOKEN, SLOT) for axis in mask.axes) == _rank(mask.selected)
            unwritten = all(self._contents(each, node) is each for each in mask.nodes)
            return Total(_numel(mask.selected), exact) if mask.classes is not None and unwritten else None
        counted: Any = node.args[0] if node.args else None
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if not isinstance(counted, fx.Node) or dims not in (0, -2, (0,), [0], (-2,), [-2]) or _rank(counted) != 2:
            return None
        if value_of(node).dtype not in COUNT_DTYPES:
            return None
        while (source := copied_from(counted)) is not None and self._contents(counted, node) is counted:
            counted = source
        made = self._contents(counted, node)
        return self._total_of_scatter(made) if made is not None and made.target in _SCATTER else None

    def _total_of_scatter(self, node: fx.Node) -> Total | None:
        """``zeros([tokens, E]).scatter(1, ids, 1)``: a token counts once for each expert that its slots name."""
        if len(node.args) != 4 or node.kwargs:
            return None
        base, dim, ids, value = node.args
        if dim not in (1, -1) or value not in (1, 1.0) or not isinstance(ids, fx.Node) or _rank(ids) != 2:
            return None
        if not self._is_zeros(base, node):
            return None
        return Total(_numel(ids), exact=are_distinct(ids, self._effects))

    # -- memory

    def _contents(self, node: fx.Node, reader: fx.Node) -> fx.Node | None:
        """The call that made what ``reader`` finds in ``node``; None if that is not one call."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return None
        storage = storage_of(value)
        writes = [other for other in self._nodes if storage in self._effects[other].writes]
        writes = [other for other in writes if self._position[other] < self._position[reader]]
        if not writes:
            return node
        whole = len(writes) == 1 and writes[0].target in _SCATTER | _SCATTER_ADD
        return writes[0] if whole and writes[0].args[0] in (node, _base(node)) else None

    def _is_zeros(self, base: Any, writer: fx.Node) -> bool:
        """Is ``base`` made of zeros, and still so when ``writer`` takes it?"""
        return _is_made_of(base, ZEROS) and self._contents(base, writer) is base


def _base(node: fx.Node) -> Any:
    return node.args[0] if node.args else None


def _is_made_of(node: Any, makers: set[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op.startswith("call_") and node.target in makers


def _rank(node: Any) -> int:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else -1


def _numel(node: Any) -> Any:
    return expression(value_of(node).numel())
