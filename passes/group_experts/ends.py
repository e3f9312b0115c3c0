"""Finds where the rows that experts have computed are put: what a loop over experts ends in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.values import makes_tensor, value_of
from glue_compiler.passes.group_experts.row_sets import TOKEN, Index, RowSet, RowSets

aten = torch.ops.aten
ENDS = {aten.index_add, aten.index_put, aten.scatter_add, aten.scatter_reduce}
"""Operators that put rows back."""


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
    calls = sets.operators.calls(node) or []
    # All but the last only make views of what it is given.
    if not calls or any(call.written for call in calls[:-1]):
        return None
    call, how = calls[-1], {"in_place": bool(calls[-1].written)}
    match call:
        case Call(aten.index_add, {"dim": 0 | -2, "alpha": 1} as given) if len(calls) == 1:
            found, added = sets.index(given["index"]), given["source"]
        case Call(aten.scatter_add | aten.scatter_reduce, {"dim": 0 | -2, "src": Value() as added} as given) if len(
            calls
        ) == 1 and (given.get("reduce", "sum"), given.get("include_self", True)) == ("sum", True):
            found = sets.index(given["index"], rank=2) if _is_alike(given["index"], added, sets.operators) else None
        case Call(aten.index_put, {"indices": indices} as given):
            found, added = _token_index(indices, sets), before_broadcast(sets.operators, given["values"], node)
            if not given["accumulate"]:
                return _put(node, given["self"], found, added, sets) if found is not None and call.written else None
        case _:
            return None
    if found is None or found.is_boolean or found.axes != (TOKEN,):
        return None
    return _checked(sets, node, found.rows, added, **how)


def _is_alike(first: Any, second: Value, operators: Operators) -> bool:
    return operators.is_tensor(first) and operators.shape(first) == operators.shape(second)


def _put(node: fx.Node, accumulator: Value, index: Index, written: Any, sets: RowSets) -> Sink | None:
    """``out[rows] = out[rows] + added``, or ``out[rows] = added``."""
    match sets.operators.does(written):
        case Call(aten.add, {"alpha": 1}) as add:
            for read, added in add.either_way:
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


def before_broadcast(operators: Operators, value: Any, node: fx.Node) -> Any:
    """What an assignment was given, before it made views of it to fit."""
    while isinstance(value, Value) and value.node is node and value.step >= 0:
        call = operators.does(value, aten.view, aten.expand, aten._to_copy)
        if call is None:
            return None
        value = call.arguments["self"]
    return value


def _checked(sets: RowSets, node: fx.Node, rows: RowSet, added: Any, **how: Any) -> Sink | None:
    """The tensors by the nodes that are passed."""
    accumulator = sets.operators.passed_as(node, "self")
    given = sets.operators.node_of(added)
    if accumulator is None or given is None or not makes_tensor(accumulator):
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
    match operators.only_call(node):
        case Call(aten.cat, {"tensors": tensors, "dim": int(dim)}):
            parts = [operators.node_of(each) for each in tensors]
            found = [part for part in parts if part is not None]
            return found if dim in (0, -value_of(node).dim()) and len(found) == len(parts) else []
    return []
