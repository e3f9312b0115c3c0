"""Which memory the code that is being traced has written so far, asked of what its operators do.

Autograd's version counters do not tell: a write through ``.data``, or of a list of tensors, advances another one, or
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from glue_compiler.compat import dynamo_tracing, symbols
from glue_compiler.fx.bodies import is_higher_order
from glue_compiler.fx.effects import EffectAnalysis, Effects, Kind, is_known_function
from glue_compiler.fx.records import CallRecord
from glue_compiler.fx.values import StorageKey, is_call, tensors_in, values_of


class TracedWrites(dynamo_tracing.TracingObserver):
    """Of one frame, bodies included. Nodes are noted when Dynamo makes them, and looked at when somebody asks."""

    def __init__(self) -> None:
        self.begins()

    def begins(self) -> None:
        self._waiting: list[fx.Node] = []
        self._written: set[StorageKey] = set()
        self._anything = False
        self._effects: dict[int, EffectAnalysis] = {}
        """By fake mode."""

    def made(self, node: fx.Node, frame: Any, bodies_of: Sequence[Any], misuses_index: bool) -> None:
        if is_call(node):
            self._waiting.append(node)

    def may_have_written(self, storages: Iterable[StorageKey]) -> bool:
        for node in self._waiting:
            self._look_at(node)
        self._waiting.clear()
        return self._anything or not self._written.isdisjoint(storages)

    def effects_of(self, node: fx.Node) -> Effects:
        """What one call does, as if no mode was switched around it."""
        return self._analysis_for(node).of(None, node)

    def record_of(self, node: fx.Node) -> CallRecord | None:
        """The operators that one call dispatches, likewise."""
        return self._analysis_for(node).record_of(None, node)

    def _analysis_for(self, node: fx.Node) -> EffectAnalysis:
        mode = symbols.fake_mode_of(tensors_in(values_of((node, *node.all_input_nodes))))
        return self._effects.setdefault(id(mode), EffectAnalysis(mode))

    def _look_at(self, node: fx.Node) -> None:
        tensors = tensors_in(values_of((node, *node.all_input_nodes)))
        if is_higher_order(node):
            if any(arg.op == "get_attr" for arg in node.all_input_nodes):
                return  # the nodes of its body were noted by themselves
        elif not tensors and is_known_function(node):  # it switches a mode, or computes with numbers
            return
        found = self.effects_of(node)
        self._written |= found.writes
        self._anything |= found.kind is Kind.BARRIER
