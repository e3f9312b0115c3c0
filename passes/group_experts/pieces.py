"""Pieces of tensors: consecutive rows, from one sum of row counts to another."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.group_experts.boundaries import Boundaries, Boundary

_SPLIT = {torch.split, torch.functional.split, torch.split_with_sizes, "split", "split_with_sizes"}
_NARROW = {torch.narrow, "narrow"}

Extent = tuple[Boundary, Boundary]
"""First row, and the one after the last."""


@dataclass(frozen=True)
class Piece:
    """``source[start:stop]``."""

    node: fx.Node
    source: fx.Node
    extent: Extent
    numbers: tuple[fx.Node, ...]
    """What the extent was read from."""
    split: fx.Node | None = None
    """The ``split`` that gave it. One raises unless its sizes are not negative and sum to the rows of ``source``."""


@dataclass(frozen=True)
class Write:
    """``into[start:stop] = value``."""

    node: fx.Node
    into: fx.Node
    extent: Extent
    numbers: tuple[fx.Node, ...]
    value: fx.Node


@dataclass(frozen=True)
class PieceRows:
    """The rows of one expert: pieces of one extent, of one or more tensors."""

    pieces: tuple[Piece, ...]
    expert: int

    @property
    def root(self) -> fx.Node:
        return self.pieces[0].node

    @property
    def count(self) -> Any:
        """Sympy expression of the number of rows."""
        return expression(value_of(self.root).shape[0])


class Pieces:
    """Recognises pieces, and writes to pieces, whose extent is read from row counts."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries

    def piece(self, node: fx.Node) -> Piece | None:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = node.args[0]
            if source.target in _SPLIT:
                return self._of_split(node, source, node.args[1])
            bounds = self._rows(node.args[1])
            return self._made(node, source, *bounds) if bounds is not None else None
        if node.target in _NARROW and len(node.args) == 4 and node.args[1] == 0:
            source, _, start, length = node.args  # type: ignore[assignment]
            return self._made(node, source, start, length, stop_is_length=True)
        return None

    def write(self, node: fx.Node) -> Write | None:
        if node.target is not operator.setitem or len(node.args) != 3:
            return None
        into, index, value = node.args
        bounds = self._rows(index)
        if bounds is None or not isinstance(into, fx.Node) or not isinstance(value, fx.Node):
            return None
        extent = self._extent(*bounds)
        return Write(node, into, extent, _nodes(*bounds), value) if extent else None

    def _rows(self, index: Any) -> tuple[Any, Any] | None:
        """(start, stop) of an index that selects rows and nothing else."""
        rows, *rest = index if isinstance(index, tuple | list) and index else (index,)
        if not isinstance(rows, slice) or rows.step not in (None, 1) or rows.stop is None:
            return None
        if any(item is not Ellipsis and item != slice(None) for item in rest):
            return None
        return (0 if rows.start is None else rows.start), rows.stop

    def _made(self, node: fx.Node, source: Any, start: Any, stop: Any, stop_is_length: bool = False) -> Piece | None:
        if not isinstance(source, fx.Node) or not _has_rows(source) or not _has_rows(node):
            return None
        extent = self._extent(start, stop, stop_is_length)
        return Piece(node, source, extent, _nodes(start, stop)) if extent else None

    def _extent(self, start: Any, stop: Any, stop_is_length: bool = False) -> Extent | None:
        first, last = self._boundaries.of(start), self._boundaries.of(stop)
        if first is None or last is None or (first.is_constant and last.is_constant):
            return None
        return first, (first.plus(last) if stop_is_length else last)

    def _of_split(self, node: fx.Node, split: fx.Node, index: Any) -> Piece | None:
        source = split.args[0]
        names = ("split_size_or_sections", "split_size", "split_sizes")
        sizes = split.args[1] if len(split.args) > 1 else _first(split.kwargs.get, names)
        dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        if not isinstance(source, fx.Node) or not isinstance(sizes, tuple | list) or type(index) is not int:
            return None
        if not _has_rows(source) or dim not in (0, -value_of(source).dim()) or not 0 <= index < len(sizes):
            return None
        start: Boundary | None = Boundary()
        for size in sizes[: index + 1]:
            before, length = start, self._boundaries.of(size)
            if before is None or length is None:
                return None
            start = before.plus(length)
        if start is None or all(self._boundaries.of(size).is_constant for size in sizes):  # type: ignore[union-attr]
            return None
        return Piece(node, source, (before, start), _nodes(*sizes), split)  # type: ignore[arg-type]


def _has_rows(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _nodes(*values: Any) -> tuple[fx.Node, ...]:
    return tuple(value for value in values if isinstance(value, fx.Node))


def _first(get: Callable[[str], Any], names: tuple[str, ...]) -> Any:
    return next((found for name in names if (found := get(name)) is not None), None)
