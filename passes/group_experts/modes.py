"""Whether the nodes of a loop run in one mode of autograd and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.passes.group_experts.left_alone import LeftAlone


class Modes:
    """Read once per graph."""

    def __init__(self, gm: fx.GraphModule, nodes: Iterable[fx.Node], analysis: EffectAnalysis) -> None:
        self._of = {node: analysis.mode_of(gm, node) for node in nodes}

    def check_uniform(self, nodes: Sequence[fx.Node]) -> None:
        """Raises LeftAlone unless all of them run in one mode."""
        first = self._of[nodes[0]]
        for node in nodes:
            mode = self._of[node]
            if mode != first:
                autograd = f"autograd ({mode.grad} here, {first.grad} before)"
                what = "autocast" if mode.autocast != first.autocast else autograd
                raise LeftAlone(f"the loop's body runs in more than one mode of {what}", node)

    def autocast_of(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes that opened the autocast regions around ``node``, outermost first."""
        return self._of[node].opened
