"""Pieces of tensors: consecutive rows, from one sum of row counts to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.operators import Call, Operators, Value, given_leaves
from glue_compiler.fx.records import Given
from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.group_experts.counts import CountSum, CountSums

aten = torch.ops.aten
Extent = tuple[CountSum, CountSum]
"""First row, and the one after the last."""


@dataclass(frozen=True)
class Piece:
    """``source[start:stop]``."""

    node: fx.Node
    source: fx.Node
    rows: Value
    """What ``source`` holds there."""
    extent: Extent
    numbers: tuple[fx.Node, ...]
    """What the extent was read from."""
    split: fx.Node | None = None
    """The ``split`` that gave it. One raises unless its sizes are not negative and sum to the rows of ``source``."""

    @property
    def length(self) -> CountSum:
        start, stop = self.extent
        return stop - start


@dataclass(frozen=True)
class PieceWrite:
    """``into[start:stop] = value``."""

    node: fx.Node
    into: fx.Node
    extent: Extent
    numbers: tuple[fx.Node, ...]
    value: fx.Node


@dataclass(frozen=True)
class ExpertPieces:
    """The rows of one expert: pieces of one extent, of one or more tensors."""

    pieces: tuple[Piece, ...]
    expert: int

    @property
    def root(self) -> fx.Node:
        return self.pieces[0].node

    @property
    def entries(self) -> tuple[fx.Node, ...]:
        """Where the rows come into the expert's body."""
        return tuple(piece.node for piece in self.pieces)

    @property
    def extent(self) -> Extent:
        return self.pieces[0].extent

    @property
    def count(self) -> Any:
        """Sympy expression of the number of rows."""
        return expression(value_of(self.root).shape[0])


class Pieces:
    """Recognises pieces, and writes to pieces, whose extent is read from row counts."""

    def __init__(self, operators: Operators, sums: CountSums) -> None:
        self._operators = operators
        self._sums = sums

    def piece(self, node: fx.Node) -> Piece | None:
        if not node.op.startswith("call_"):
            return None
        value = self._operators.value(node)
        call = self._operators.does(value)
        if call is None or not isinstance(call.arguments.get("self"), Value):
            return None
        if call.operator in (aten.split_with_sizes, aten.split):
            return self._of_split(node, value, call)
        bounds = self._bounds(call)
        if value.node is not node or bounds is None or len(self._operators.calls(node) or ()) != 1:
            return None
        source = self._operators.passed_as(node, "self")
        extent = self._extent(*bounds)
        if source is None or extent is None:
            return None
        return Piece(node, source, call.arguments["self"], extent, _others(node, source))

    def write(self, node: fx.Node) -> PieceWrite | None:
        """``into[start:stop] = value``: a copy to a slice."""
        calls = self._operators.calls(node) if node.op.startswith("call_") else None
        match calls[-1] if calls else None:
            case Call(aten.copy_, {"self": Value() as target, "src": Value() as value}) if target.node is node:
                pass
            case _:
                return None
        sliced = self._operators.does(target)
        bounds = self._bounds(sliced) if sliced is not None else None
        extent = self._extent(*bounds) if bounds is not None else None
        while value.node is node and value.step >= 0:
            made = self._operators.does(value)
            if made is None or made.operator not in (aten.view, aten.expand):
                return None
            value = made.arguments["self"]
        written = self._operators.node_of(value)
        if extent is None or written is None or sliced is None or sliced.node is not node:
            return None
        record = self._operators.record(node)
        given = record.operators[target.step].arguments["self"] if record is not None else None
        if not isinstance(given, Given):
            return None
        into = given_leaves(node)[given.position][0]
        others = tuple(arg for arg in _others(node, into) if arg is not written)
        return PieceWrite(node, into, extent, others, written)

    def _bounds(self, call: Call) -> tuple[Any, Any] | None:
        """(start, stop) of an operator that selects rows and nothing else."""
        match call:
            case Call(aten.slice, {"dim": 0, "start": start, "end": end, "step": 1}):
                return (0 if start is None else start), end
            case Call(aten.narrow, {"dim": 0, "start": start, "length": length}) if not isinstance(start, Value):
                return start, start + length
        return None

    def _extent(self, start: Any, stop: Any) -> Extent | None:
        first, last = self._sums.of(start), self._sums.of(stop)
        return None if first is None or last is None or (first.is_constant and last.is_constant) else (first, last)

    def _of_split(self, node: fx.Node, value: Value, call: Call) -> Piece | None:
        """An item of ``source.split(sizes)``."""
        split, index = value.node, value.leaf
        sizes = call.arguments["split_sizes" if call.operator is aten.split_with_sizes else "split_size"]
        source = self._operators.passed_as(split, "self")
        if source is None or split is node or not isinstance(sizes, tuple) or index >= len(sizes):
            return None
        if call.arguments["dim"] not in (0, -self._operators.meta(call.arguments["self"]).rank):
            return None
        at = CountSum()
        before = at
        lengths = [self._sums.of(size) for size in sizes]
        for length in lengths[: index + 1]:
            if length is None:
                return None
            before, at = at, at + length
        if all(length is not None and length.is_constant for length in lengths):
            return None
        return Piece(node, source, call.arguments["self"], (before, at), _others(split, source), split)


def _others(node: fx.Node, source: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(arg for arg in node.all_input_nodes if arg is not source)
