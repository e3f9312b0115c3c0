"""Finds where the rows of one expert are put back: what a loop over experts ends in."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.spellings import ADD
from glue_compiler.fx.values import value_of
from glue_compiler.passes.group_experts.row_sets import TOKEN, Index, RowSet, RowSets

_INDEX_ADD = {torch.index_add, "index_add", "index_add_"}
_ADD = ADD | {operator.iadd, "add_", "__iadd__"}


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


def find_sink(node: fx.Node, sets: RowSets) -> Sink | None:
    """The sink that ``node`` is, in any of its spellings."""
    if node.target in _INDEX_ADD and not node.kwargs and len(node.args) == 4:
        accumulator, dim, index, added = node.args
        found = _token_index(index, sets)
        if found is None or dim != 0 or found.rows.root is index:
            return None
        return _checked(Sink(node, accumulator, found.rows, added, in_place=node.target == "index_add_"))  # type: ignore[arg-type]
    if node.target is operator.setitem and not node.kwargs:
        accumulator, index, written = node.args
        found = _token_index(index, sets)
        return None if found is None else _put(node, accumulator, found, written, sets)
    return None


def _put(node: fx.Node, accumulator: Any, index: Index, written: Any, sets: RowSets) -> Sink | None:
    """``out[rows] = out[rows] + added``, or ``out[rows] = added``."""
    if not isinstance(written, fx.Node):
        return None
    if written.target in _ADD and len(written.args) == 2 and not written.kwargs:
        for read, added in (written.args, written.args[::-1]):
            if _reads(read, accumulator, index, sets):
                parts = (read, written)
                return _checked(Sink(node, accumulator, index.rows, added, parts=parts))  # type: ignore[arg-type]
    return _checked(Sink(node, accumulator, index.rows, written, adds=False))


def _reads(node: Any, accumulator: Any, index: Index, sets: RowSets) -> bool:
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.args[0] is not accumulator:
        return False
    found = _token_index(node.args[1], sets)
    return found is not None and found.rows.root is index.rows.root


def _token_index(index: Any, sets: RowSets) -> Index | None:
    """The row set, if ``index`` is by token alone."""
    items = list(index) if isinstance(index, tuple | list) else [index]
    while len(items) > 1 and (items[-1] is Ellipsis or items[-1] == slice(None)):
        items.pop()
    found = sets.index(items[0]) if len(items) == 1 else None
    return found if found is not None and found.axes == (TOKEN,) else None


def _checked(sink: Sink) -> Sink | None:
    tensors = isinstance(sink.accumulator, fx.Node) and isinstance(sink.added, fx.Node)
    return sink if tensors and isinstance(value_of(sink.accumulator), torch.Tensor) else None


def chain_starts(sinks: list[Sink]) -> dict[fx.Node, fx.Node]:
    """Node of each sink, in graph order → the accumulator that the first sink of its chain adds to."""
    starts: dict[fx.Node, fx.Node] = {}
    for sink in sinks:
        starts[sink.node] = starts.get(sink.accumulator, sink.accumulator)
    return starts
