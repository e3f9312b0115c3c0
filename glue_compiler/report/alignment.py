"""Two versions of a graph side by side, aligned by node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
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


def align_graphs(before: Sequence[GraphText], after: Sequence[GraphText]) -> tuple[AlignedGraph, ...]:
    """Graphs are paired by name; one that only one version has is all removed or all added."""
    befores = {graph.name: graph.nodes for graph in before}
    afters = {graph.name: graph.nodes for graph in after}
    names = [*befores, *(name for name in afters if name not in befores)]
    return tuple(AlignedGraph(name, tuple(align(befores.get(name, ()), afters.get(name, ())))) for name in names)


def align(before: Sequence[NodeLine], after: Sequence[NodeLine]) -> Iterator[Row]:
    """Rows in the order of both graphs. Names are unique in a graph, so that nodes are matched by name."""
    old, new = ([node.name for node in nodes] for nodes in (before, after))
    both = {*old} & {*new}
    left = right = 0
    for start, place, size in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        yield from (Row("moved" if node.name in both else "removed", node, None) for node in before[left:start])
        yield from (Row("moved" if node.name in both else "added", None, node) for node in after[right:place])
        left, right = start + size, place + size
        for one, other in zip(before[start:left], after[place:right], strict=True):
            yield Row("same" if (one.text, one.shape) == (other.text, other.shape) else "changed", one, other)
