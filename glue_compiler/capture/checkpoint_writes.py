"""Checkpointed bodies that write memory from outside, and that Dynamo would have left to eager without glue.

Eager code writes again when backward recomputes the body; a body that is captured writes once, with any backend. So
where data-dependent capture is what lets such a body into a graph, the frame is converted again without it: glue does
not change how often a program writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from glue_compiler.capture.traced_writes import TracedWrites
from glue_compiler.compat import dynamo_tracing, symbols
from glue_compiler.fx.bodies import CHECKPOINT, is_higher_order
from glue_compiler.fx.values import StorageKey, is_call, storages_of, unbacked_in, value_of, values_of


class CheckpointWrites(dynamo_tracing.TracingObserver):
    """Of one frame that is being traced; its checkpointed bodies are looked at as one. ``writes``: of the frame."""

    def __init__(self, writes: TracedWrites) -> None:
        self.writes = writes
        self.begins()

    def begins(self) -> None:
        self.repeated: str | None = None
        """A write that eager code would do once more, in words."""
        self._waiting: list[fx.Node] = []
        """Calls in bodies that were not looked at yet."""
        self._depends = False
        """Does a body make sizes that depend on data, or branch on what a tensor holds?"""
        self._given: set[StorageKey] = set()

    def decide(self, frame: Any, at: int | None, node: fx.Node, expression: Any) -> bool | None:
        depends = expression is None or bool(symbols.unbacked_symbols(expression))  # else it asks for a known size
        self._depends = self._depends or (depends and CHECKPOINT in dynamo_tracing.bodies_around(frame))
        return None

    def made(self, node: fx.Node, frame: Any, bodies_of: Sequence[Any], misuses_index: bool) -> None:
        if node.target is CHECKPOINT and self.repeated is None:  # its body is complete
            self._depends = self._depends or any(map(_makes_sizes, self._waiting))
            if self._depends:
                self._look()
        if is_call(node) and CHECKPOINT in bodies_of:
            self._waiting.append(node)

    def _look(self) -> None:
        operands = {operand for node in self._waiting for operand in node.all_input_nodes}
        self._given |= storages_of([value_of(each) for each in operands if not is_call(each)])
        found = next((node for node in self._waiting if not self._given.isdisjoint(self._written(node))), None)
        if found is not None:
            self.repeated = f"'{found.name}' writes in a checkpointed body that depends on data"
        self._waiting.clear()

    def _written(self, node: fx.Node) -> frozenset[StorageKey]:
        if is_higher_order(node):
            return frozenset()  # the nodes of its body were noted by themselves
        return self.writes.effects_of(node).writes


def _makes_sizes(node: fx.Node) -> bool:
    given = unbacked_in(values_of(node.all_input_nodes))
    return not set(unbacked_in(value_of(node))) <= set(given)
