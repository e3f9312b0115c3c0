"""The rows of one expert, however a loop comes by them, and what is computed from them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from torch import fx


class ExpertRows(Protocol):
    """The rows of one expert, as a body is given them."""

    @property
    def root(self) -> fx.Node:
        """What depends on it depends on these rows."""
        ...

    @property
    def expert(self) -> int: ...

    @property
    def count(self) -> Any:
        """Sympy expression of the number of rows."""
        ...


def dependents(roots: dict[fx.Node, fx.Node], ends: Collection[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Node → the roots that it is computed from; what one of ``ends`` holds is no longer followed.

    Args:
        roots: node → the root that stands for it.
    """
    found: dict[fx.Node, set[fx.Node]] = {}
    for start, root in roots.items():
        waiting = [start]
        while waiting:
            node = waiting.pop()
            if root in found.setdefault(node, set()):
                continue
            found[node].add(root)
            if node not in ends:
                waiting.extend(node.users)
    return found
