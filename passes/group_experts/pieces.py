"""Pieces of tensors: consecutive rows, from one sum of row counts to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.operators import Call, Operators, Value, given_leaves
from glue_compiler.fx.records import Given
from glue_compiler.fx.values import expression, is_call, makes_tensor, value_of
from glue_compiler.passes.group_experts.counts import CountSums
from glue_compiler.passes.group_experts.ends import before_broadcast

aten = torch.ops.aten
Extent = tuple[Any, Any]
"""First row, and the one after the last, as sympy expressions of items of vectors."""


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
    def length(self) -> Any:
        start, stop = self.extent
        return sympy.expand(stop - start)


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


@dataclass(frozen=True)
class Pieces:
    """Recognises pieces, and writes to pieces, whose extent is read from row counts."""

    operators: Operators
    sums: CountSums

    def piece(self, node: fx.Node) -> Piece | None:
        if not is_call(node) or not makes_tensor(node):
            return None
        value = self.operators.value(node)
        call = self.operators.does(value)
        bounds = self._bounds(call) if call is not None else None
        if call is None or bounds is None or len(self.operators.calls(value.node) or ()) != 1:
            return None
        source = self.operators.passed_as(value.node, "self")
        extent = self._extent(*bounds)
        if source is None or extent is None:
            return None
        split = value.node if value.node is not node else None
        return Piece(node, source, call.arguments["self"], extent, _others(value.node, source), split)

    def write(self, node: fx.Node) -> PieceWrite | None:
        """``into[start:stop] = value``: a copy to a slice."""
        calls = self.operators.calls(node)
        match calls[-1] if calls else None:
            case Call(aten.copy, {"self": Value() as target, "src": Value() as value}) if target.node is node:
                pass
            case _:
                return None
        sliced = self.operators.does(target)
        bounds = self._bounds(sliced) if sliced is not None else None
        extent = self._extent(*bounds) if bounds is not None else None
        written = self.operators.node_of(before_broadcast(self.operators, value, node))
        if extent is None or written is None or sliced is None or sliced.node is not node:
            return None
        record = self.operators.record(node)
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
        return None

    def _extent(self, start: Any, stop: Any) -> Extent | None:
        first, last = self.sums.of(start), self.sums.of(stop)
        return None if first is None or last is None or (first.is_number and last.is_number) else (first, last)


def _others(node: fx.Node, source: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(arg for arg in node.all_input_nodes if arg is not source)
