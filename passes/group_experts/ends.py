"""Finds where the rows that experts have computed are put: what a loop over experts ends in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.values import value_of
from glue_compiler.passes.group_experts.row_sets import TOKEN, Index, RowSet, RowSets

aten = torch.ops.aten


@dataclass(frozen=True)
class Sink:
    """One expert's rows, added to ``accumulator`` at the tokens of a row set, or written there."""

    node: fx.Node
    """What changes the accumulator, or is the new one if ``in_place`` is false."""
    accumulator: fx.Node
    rows: RowSet
    added: fx.Node
    adds: bool = True
    in_place: bool = True
    parts: tuple[fx.Node, ...] = ()
    """Nodes that read the accumulator for it: of ``out[rows] += added`` all but the last."""

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (self.node, *self.parts)


def find_sink(node: fx.Node, sets: RowSets) -> Sink | None:
    """The sink that ``node`` is."""
    if not node.op.startswith("call_"):
        return None
    operators = sets.operators
    calls = operators.calls(node) or []
    match calls[-1] if calls else None:
        case Call(aten.index_add | aten.index_add_ as operator, {"dim": 0, "alpha": 1} as given) if len(calls) == 1:
            found = sets.index(given["index"])
            if found is None or found.is_boolean or found.axes != (TOKEN,):
                return None
            return _checked(sets, node, found.rows, given["source"], in_place=operator is aten.index_add_)
        case Call(aten.index_put_, {"indices": indices} as given) if sum(bool(call.written) for call in calls) == 1:
            found = _token_index(indices, sets)
            if found is None:
                return None
            written = _before_broadcast(sets, given["values"], node)
            if not given["accumulate"]:
                return _put(node, given["self"], found, written, sets)
            return None if found.is_boolean else _checked(sets, node, found.rows, written)
    return None


def _put(node: fx.Node, accumulator: Value, index: Index, written: Any, sets: RowSets) -> Sink | None:
    """``out[rows] = out[rows] + added``, or ``out[rows] = added``."""
    match sets.operators.does(written) if isinstance(written, Value) else None:
        case Call(aten.add, {"self": first, "other": second, "alpha": 1}):
            for read, added in ((first, second), (second, first)):
                if _reads(read, accumulator, index, sets):
                    return _checked(sets, node, index.rows, added, parts=(read.node, written.node))
        case Call(aten.add_, {"self": read, "other": added, "alpha": 1}):
            if _reads(read, accumulator, index, sets):
                return _checked(sets, node, index.rows, added, parts=(read.node, written.node))
    return _checked(sets, node, index.rows, written, adds=False)


def _reads(value: Any, accumulator: Value, index: Index, sets: RowSets) -> bool:
    """Is it ``out[rows]``, of what the accumulator holds where it is written?"""
    if not isinstance(value, Value) or sets.operators.value(value.node) != value:
        return False
    match sets.operators.does(value):
        case Call(aten.index, {"self": source, "indices": indices}) if source == accumulator:
            found = _token_index(indices, sets)
            return found is not None and found.rows.root is index.rows.root
    return False


def _token_index(indices: tuple[Any, ...], sets: RowSets) -> Index | None:
    """The row set, if what is indexed is indexed by token alone."""
    first, *rest = indices
    found = sets.index(first) if all(item is None for item in rest) else None
    return found if found is not None and found.axes == (TOKEN,) else None


def _before_broadcast(sets: RowSets, value: Any, node: fx.Node) -> Any:
    """What an assignment was given, before it made views of it to fit."""
    while isinstance(value, Value) and value.node is node and value.step >= 0:
        call = sets.operators.does(value)
        if call is None or call.operator not in (aten.view, aten.expand, aten.to):
            return None
        value = call.arguments["self"]
    return value


def _checked(sets: RowSets, node: fx.Node, rows: RowSet, added: Any, **how: Any) -> Sink | None:
    """The tensors by the nodes that are passed."""
    accumulator = sets.operators.passed_as(node, "self")
    given = sets.operators.node_of(added) if isinstance(added, Value) else None
    if accumulator is None or given is None or not isinstance(value_of(accumulator), torch.Tensor):
        return None
    return Sink(node, accumulator, rows, given, **how)


def chain_starts(sinks: list[Sink]) -> dict[fx.Node, fx.Node]:
    """Node of each sink, in graph order → the accumulator that the first sink of its chain adds to."""
    starts: dict[fx.Node, fx.Node] = {}
    for sink in sinks:
        starts[sink.node] = starts.get(sink.accumulator, sink.accumulator)
    return starts


def joined(node: fx.Node, operators: Operators) -> list[fx.Node]:
    """The tensors that ``node``, a ``cat``, puts behind each other."""
    calls = operators.calls(node) if node.op.startswith("call_") else None
    match calls:
        case [Call(aten.cat | aten.concat | aten.concatenate, {"tensors": tensors, "dim": int(dim)})]:
            parts = [operators.node_of(each) if isinstance(each, Value) else None for each in tensors]
            found = [part for part in parts if part is not None]
            return found if dim in (0, -value_of(node).dim()) and len(found) == len(parts) else []
    return []
