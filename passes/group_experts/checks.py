"""One graph as the readers of loops see it, and what they all prove: of users, of memory, and of modes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import sympy
from torch import fx

from glue_compiler.fx import bodies
from glue_compiler.fx.effects import Effects, Kind
from glue_compiler.fx.modes import Mode
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.values import StorageKey, expression, storages_of, tensors_in, value_in, value_of
from glue_compiler.passes.group_experts.counts import CountSums
from glue_compiler.passes.group_experts.plan import LeftAlone
from glue_compiler.passes.group_experts.row_sets import RowSets


class ReadGraph:
    """The nodes in order of execution, as they are before anything is written; remembers what was read of them."""

    def __init__(self, gm: fx.GraphModule, operators: Operators) -> None:
        self.gm = gm
        self.nodes = list(gm.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.operators = operators
        self.sets = RowSets(operators)

    @cached_property
    def sums(self) -> CountSums:
        return CountSums(self.operators, self.nodes)

    @cached_property
    def effects(self) -> dict[fx.Node, Effects]:
        return {node: self._effects_of(node) for node in self.nodes}

    def _effects_of(self, node: fx.Node) -> Effects:
        known = None if bodies.is_higher_order(node) else self.operators.numbering.effects.get(node)
        return known if known is not None else self.operators.analysis.of(self.gm, node)

    def mode_of(self, node: fx.Node) -> Mode:
        return self.operators.analysis.mode_of(self.gm, node)

    def in_order(self, nodes: Collection[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.position.__getitem__)

    # -- proofs; they raise LeftAlone

    def check_users(self, values: Collection[fx.Node], belongs: Callable[[fx.Node], bool]) -> None:
        """A value of one expert's rows has no user outside of the loop."""
        for node in self.in_order(values):
            for user in node.users:
                if belongs(user):
                    continue
                if self.effects[user].writes:
                    raise LeftAlone("the body writes a tensor in place; out of place it would be grouped", user)
                raise LeftAlone(
                    f"'{node.name}', a value of one expert's rows, is used outside of the loop's body", user
                )

    def check_unwritten(
        self,
        inside: Collection[fx.Node],
        last: fx.Node,
        writers: Collection[fx.Node],
        own: Collection[StorageKey] = (),
    ) -> None:
        """What is written where a loop ends reads its operands there, so nothing may write them before.

        Args:
            inside: the nodes that read, and whose operands are read; nothing but these is known to happen.
            writers: those of the loop that may write; ``own``: memory that is the loop's result.
        """
        operands = {arg for node in inside for arg in (node, *node.all_input_nodes)}
        read = {storage for node in operands for storage in storages_of(value_of(node))} - set(own)
        begin = min(self.position[node] for node in inside)
        for node in self.nodes[begin : self.position[last]]:
            effects = self.effects[node]
            if effects.kind is Kind.BARRIER and node not in inside:
                raise LeftAlone(f"'{node.name}' runs between the experts, and what it does is not known", node)
            if effects.writes & read and node not in writers:
                raise LeftAlone("an operand of the loop is written while the loop runs", node)

    def check_one_mode(self, ends: Collection[fx.Node], computed: Collection[fx.Node]) -> None:
        """The ends of a loop run in the mode of autograd and autocast that its arithmetic runs in."""
        nodes = [*self.in_order(ends), *(node for node in self.in_order(computed) if _is_float(node))]
        first = self.mode_of(nodes[0])
        for node in nodes:
            mode = self.mode_of(node)
            if mode != first:
                autograd = f"autograd ({mode.grad} here, {first.grad} before)"
                what = "autocast" if mode.autocast != first.autocast else autograd
                raise LeftAlone(f"the loop's body runs in more than one mode of {what}", node)


def cannot_fail(check: fx.Node, counts: Collection[Any], most: Any) -> bool:
    """Does ``check`` assert something that holds of each of ``counts``, numbers between 0 and ``most``?"""
    given = check.args[0] if check.args else None
    holds = expression(value_in(given))
    match holds:
        case sympy.Ge():
            return bool(holds.lhs in counts and holds.rhs.is_number and holds.rhs <= 0)
        case sympy.Le():
            room = holds.rhs - most
            return bool(holds.lhs in counts and room.is_number and room >= 0)
    return holds in (True, sympy.true)


def _is_float(node: fx.Node) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors_in(value_of(node)))
