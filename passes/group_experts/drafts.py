"""Grouped forms that are written beside what they stand for, which stays until all of the graph is decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from glue_compiler.passes.group_experts.left_alone import LeftAlone


@dataclass(frozen=True)
class Draft:
    """Nodes that nothing uses yet. ``put_in`` makes the graph use them, and erases what they stand for."""

    graph: fx.Graph
    nodes: tuple[fx.Node, ...]
    put_in: Callable[[], None]

    def erase(self) -> None:
        for node in reversed(self.nodes):
            self.graph.erase_node(node)


def drafted(graph: fx.Graph, write: Callable[[], Callable[[], None]]) -> Draft:
    """What ``write`` adds to ``graph``. Raises LeftAlone, and leaves the graph as it was, if it cannot be written.

    A proof reads what operators do to rows, and not every size and dtype of what they give for all rows: that is seen
    here, where each new node is run on fake tensors.
    """
    before = set(graph.nodes)
    try:
        put_in = write()
    except Exception as failure:
        for node in reversed([node for node in graph.nodes if node not in before]):
            graph.erase_node(node)
        if isinstance(failure, LeftAlone):
            raise
        raise LeftAlone(f"its grouped form cannot be written ({type(failure).__name__}: {failure})") from failure
    return Draft(graph, tuple(node for node in graph.nodes if node not in before), put_in)
