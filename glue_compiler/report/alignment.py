"""Two versions of a graph side by side, aligned by node."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from glue_compiler.report.graph_text import GraphText, NodeLine

Kind = Literal["same", "changed", "removed", "added", "moved"]


@dataclass(frozen=True)
class Row:
    """One line of a side-by-side diff.

    ``changed``: a node of one name that computes something else. ``moved``: a node that both graphs have, in another
    order; it appears twice, once on each side. ``removed`` and ``added``: only one graph has it.
    """

    kind: Kind
    before: NodeLine | None
    after: NodeLine | None


@dataclass(frozen=True)
class AlignedGraph:
    """One graph or body, before and after."""

    name: str
    rows: tuple[Row, ...]

    @property
    def is_changed(self) -> bool:
        return any(row.kind != "same" for row in self.rows)


def align_graphs(before: Sequence[GraphText], after: Sequence[GraphText]) -> tuple[AlignedGraph, ...]:
    """Graphs are paired by name; one that only one version has is all removed or all added."""
    befores = {graph.name: graph.nodes for graph in before}
    afters = {graph.name: graph.nodes for graph in after}
    names = [*befores, *(name for name in afters if name not in befores)]
    return tuple(AlignedGraph(name, tuple(align(befores.get(name, ()), afters.get(name, ())))) for name in names)


def align(before: Sequence[NodeLine], after: Sequence[NodeLine]) -> Iterator[Row]:
    """Rows in the order of both graphs. Names are unique in a graph, so that nodes are matched by name.

    Nodes that keep their order, as many as possible, share a row: a longest increasing subsequence of their places
    (Fredman, "On computing the length of longest increasing subsequences", 1975).
    """
    places = {node.name: place for place, node in enumerate(after)}
    common = [(number, places[node.name]) for number, node in enumerate(before) if node.name in places]
    kept = [common[index] for index in _longest_increasing([place for _, place in common])]
    names_before = {node.name for node in before}
    left = right = 0
    for number, place in [*kept, (len(before), len(after))]:
        for node in before[left:number]:
            yield Row("moved" if node.name in places else "removed", node, None)
        for node in after[right:place]:
            yield Row("moved" if node.name in names_before else "added", None, node)
        if number < len(before):
            old, new = before[number], after[place]
            yield Row("same" if (old.text, old.shape) == (new.text, new.shape) else "changed", old, new)
        left, right = number + 1, place + 1


def _longest_increasing(values: Sequence[int]) -> list[int]:
    """Indices of a longest strictly increasing subsequence."""
    ends: list[int] = []  # smallest last value of a subsequence of each length
    indices: list[int] = []
    previous: list[int] = []
    for index, value in enumerate(values):
        length = bisect_left(ends, value)
        previous.append(indices[length - 1] if length else -1)
        if length == len(ends):
            ends.append(value)
            indices.append(index)
        else:
            ends[length], indices[length] = value, index
    found = []
    index = indices[-1] if indices else -1
    while index >= 0:
        found.append(index)
        index = previous[index]
    return found[::-1]
