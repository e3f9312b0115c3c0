"""Applies a plan: unify symbols, lift values in front of the calls, merge duplicates."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx

from glue_compiler.compat import symbols
from glue_compiler.fx.effects import Kind
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.value_numbering import Numbering
from glue_compiler.fx.values import value_of
from glue_compiler.passes.hoist_metadata.analysis import HoistPlan, Lift


def apply_plan(plan: HoistPlan, numbering: Numbering, shape_env: Any) -> Counter[str]:
    """Rewrite ``plan.scope`` and the bodies called from it; returns what was done, by kind."""
    counts: Counter[str] = Counter()
    # First, because it is the step that can be refused: nothing has been rewritten by then.
    for symbol, survivor in plan.equal_symbols.items():
        symbols.rename_unbacked(shape_env, symbol, survivor)
        counts["symbols_unified"] += 1
    lifted = _Lifter(plan, numbering, counts).run()
    for duplicate, keep in plan.merges.items():
        _replace(duplicate, lifted.get(keep, keep), numbering, counts)
        counts["merged"] += 1
    if not plan.is_empty:
        for scope in (plan.scope, *plan.scope.children):
            scope.module.recompile()
    return +counts


class _Lifter:
    def __init__(self, plan: HoistPlan, numbering: Numbering, counts: Counter[str]) -> None:
        self.plan = plan
        self.numbering = numbering
        self.counts = counts
        self.in_caller: dict[int, fx.Node] = {}
        self.make = NodeMaker(None)

    def run(self) -> dict[fx.Node, fx.Node]:
        """Returns the new nodes of the caller, by the node of a body that each was copied from."""
        created = {}
        for lift in self.plan.lifts:
            node = lift.existing
            if node is None:
                node = created[lift.first.node] = self._compute_before_call(lift)
                self.counts["lifted"] += 1
                self.counts["syncs_removed"] -= self.numbering.effects[lift.first.node].syncs
            self.in_caller[lift.number] = node
        # Last first, so that a node's users are gone before the node.
        for lift in reversed(self.plan.lifts):
            for occurrence in lift.in_bodies:
                self._use_operand(occurrence.node, lift)
        return created

    def _compute_before_call(self, lift: Lift) -> fx.Node:
        call = lift.first.scope.call
        assert call is not None

        def caller_value(arg: fx.Node) -> fx.Node:
            return lift.arguments[arg] or self.in_caller[self.numbering.numbers[arg]]

        caller = self.plan.scope.graph
        with caller.inserting_before(call.node):
            return caller.node_copy(lift.first.node, caller_value)

    def _use_operand(self, node: fx.Node, lift: Lift) -> None:
        scope = next(s for s in self.plan.scope.children if s.graph is node.graph)
        if not node.users:
            _erase(node, self.numbering, self.counts)
            return
        if isinstance(value_of(node), tuple | list):  # limited fuel: its items were not lifted, and it is no operand
            return
        operand = self.make.brought_to(self.in_caller[lift.number], self.plan.scope, scope)
        _replace(node, operand, self.numbering, self.counts)
        self.counts["replaced"] += 1


def _replace(node: fx.Node, survivor: fx.Node, numbering: Numbering, counts: Counter[str]) -> None:
    node.replace_all_uses_with(survivor)
    _erase(node, numbering, counts)


def _erase(node: fx.Node, numbering: Numbering, counts: Counter[str]) -> None:
    effects = numbering.effects[node]
    counts["syncs_removed"] += effects.syncs
    counts["asserts_removed"] += effects.kind is Kind.ASSERT
    node.graph.erase_node(node)
