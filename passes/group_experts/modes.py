"""Which autograd and autocast mode each node of a graph runs in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from glue_compiler.fx.effects import Effects, Kind, open_or_close
from glue_compiler.passes.group_experts.left_alone import LeftAlone

GradMode = bool | None
"""None: as it is where the graph is called."""


class Modes:
    """Read once per graph."""

    def __init__(self, nodes: Iterable[fx.Node], effects: dict[fx.Node, Effects]) -> None:
        self._of: dict[fx.Node, tuple[GradMode, tuple[fx.Node, ...]]] = {}
        grad: GradMode = None
        contexts: list[fx.Node] = []
        for node in nodes:
            self._of[node] = (grad, tuple(contexts))
            kind = effects[node].kind
            if kind is Kind.GRAD_MODE:
                grad = bool(node.args[0])
            elif kind is Kind.MODE:
                open_or_close(contexts, node)

    def check_uniform(self, nodes: Sequence[fx.Node]) -> None:
        """Raises LeftAlone unless all of them run in one mode."""
        first = self._of[nodes[0]]
        for node in nodes:
            if self._of[node] != first:
                grad, contexts = self._of[node]
                what = "autocast" if contexts != first[1] else f"autograd ({grad} here, {first[0]} before)"
                raise LeftAlone(f"the loop's body runs in more than one mode of {what}", node)

    def autocast_of(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes that opened the contexts around ``node``, outermost first."""
        return tuple(
            context for context in self._of[node][1] if context.target is torch.amp.autocast_mode._enter_autocast
        )
