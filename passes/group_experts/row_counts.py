"""What is known of a vector of row counts: how many rows they count together. Read from data flow; changes nothing."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.effects import Effects
from glue_compiler.fx.values import expression, storage_of, value_of
from glue_compiler.passes.group_experts.boundaries import copied_from
from glue_compiler.passes.group_experts.row_sets import EXPERT, SLOT, TOKEN, RowSets

_SUM = {torch.sum, "sum"}
_ZEROS = {torch.zeros, torch.zeros_like, "new_zeros"}
_ONES = {torch.ones, torch.ones_like, "new_ones"}
_TOP_K = {torch.topk, "topk"}
_SCATTER = {torch.scatter, "scatter", "scatter_"}
_SCATTER_ADD = {torch.scatter_add, "scatter_add", "scatter_add_", torch.index_add, "index_add", "index_add_"}
_SAME_INDICES = {"to", "long", "int", "view", "reshape", "flatten", "contiguous", "clone", "detach", torch.flatten}


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
        if node.target in _SUM:
            return self._total_of_sum(node)
        if node.target is torch.histc:
            bins = {"bins": 100, "min": 0, "max": 0, **dict(zip(("bins", "min", "max"), node.args[1:], strict=False))}
            bins |= node.kwargs
            ids: Any = node.args[0]
            # Whatever the bins are, each number is in one of them or in none.
            return Total(_numel(ids), exact=False) if isinstance(bins["bins"], int) else None
        if node.target in _SCATTER_ADD and len(node.args) == 4 and not node.kwargs:
            base, dim, ids, source = node.args
            if dim in (0, -1) and _is_made_of(source, _ONES) and _rank(ids) == 1 and self._is_zeros(base, node):
                same = expression(value_of(source).shape[0]) == _numel(ids)  # type: ignore[arg-type]
                return Total(_numel(ids), exact=True) if same else None
        return None

    def _total_of_sum(self, node: fx.Node) -> Total | None:
        counted: Any = node.args[0] if node.args else None
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        dims = [dims] if isinstance(dims, int) else dims
        if not isinstance(counted, fx.Node) or not isinstance(dims, tuple | list):
            return None
        rank = _rank(counted)
        mask = RowSets().mask(counted)
        if mask is not None and mask.expert is None and mask.classes is not None:
            kept = [axis for i, axis in enumerate(mask.axes) if i not in {dim % rank for dim in dims}]
            # one_hot refuses ids that have no class, so each slot is counted once, unless slots were merged before.
            exact = sum(axis in (TOKEN, SLOT) for axis in mask.axes) == _rank(mask.selected)
            unwritten = all(self._contents(each, node) is each for each in mask.nodes)
            return Total(_numel(mask.selected), exact) if kept == [EXPERT] and unwritten else None
        while (source := copied_from(counted)) is not None and self._contents(counted, node) is counted:
            counted = source
        made = self._contents(counted, node)
        if rank == 2 and [dim % rank for dim in dims] == [0] and made is not None and made.target in _SCATTER:
            return self._total_of_scatter(made)
        return None

    def _total_of_scatter(self, node: fx.Node) -> Total | None:
        """``zeros([tokens, E]).scatter(1, ids, 1)``: a token counts once for each expert that its slots name."""
        if len(node.args) != 4 or node.kwargs:
            return None
        base, dim, ids, value = node.args
        if dim not in (1, -1) or value not in (1, 1.0) or not isinstance(ids, fx.Node) or _rank(ids) != 2:
            return None
        if not self._is_zeros(base, node):
            return None
        return Total(_numel(ids), exact=_names_each_once(ids, self._effects))

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
        return _is_made_of(base, _ZEROS) and self._contents(base, writer) is base


def _base(node: fx.Node) -> Any:
    return node.args[0] if node.args else None


def _is_made_of(node: Any, makers: set[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op.startswith("call_") and node.target in makers


def _rank(node: Any) -> int:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else -1


def _numel(node: Any) -> Any:
    return expression(value_of(node).numel())


def _names_each_once(ids: fx.Node, effects: Mapping[fx.Node, Effects]) -> bool:
    """Are a token's experts different ones? They are if there is one, or if they are the indices of ``topk``."""
    shape = value_of(ids).shape
    if type(shape[-1]) is int and shape[-1] == 1:
        return True
    node: Any = ids
    storages = set()
    while isinstance(node, fx.Node) and node.op == "call_method" and node.target in _SAME_INDICES:
        if _rank(node.args[0]) != len(shape):
            return False
        storages.add(storage_of(value_of(node)))
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.args[1] != 1:
        return False
    storages.add(storage_of(value_of(node)))
    if any(storages & each.writes for each in effects.values()):
        return False
    top: Any = node.args[0]
    dim = top.args[2] if len(top.args) > 2 else top.kwargs.get("dim", -1)
    return top.target in _TOP_K and dim in (-1, len(shape) - 1)
