"""Why a loop is left alone: raised by the proofs, turned into a Skip by the planner."""

from __future__ import annotations

from torch import fx


class LeftAlone(Exception):
    """``reason`` in words for the user; ``node`` the place, where it is another than the loop's first."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
