"""What is reached from some nodes of a graph, along operands or users, or from the like."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def reachable(start: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """``start``, and what is reached from there by going ``onward`` from each node."""
    found: set[Node] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += onward(node)
    return found
