"""The nodes that are reached from some of a graph, along operands or users."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx


def reachable(start: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """``start``, and what is reached from there by going ``onward`` from each node."""
    found: set[fx.Node] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += onward(node)
    return found
