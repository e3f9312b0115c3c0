"""Erases what a rewrite has left without users."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from glue_compiler.fx.effects import Kind
from glue_compiler.fx.value_numbering import Numbering


def erase_dead(numbering: Numbering, candidates: Iterable[fx.Node]) -> int:
    """Erase pure nodes without users, beginning at ``candidates``, and operands that bodies no longer use."""
    calls = {
        placeholder: scope.call for scope in numbering.scopes if scope.call for placeholder in scope.call.placeholders
    }
    erased = 0
    waiting = list(dict.fromkeys(candidates))
    while waiting:
        node = waiting.pop()
        if node.users or node._erased:
            continue
        if node in calls:
            call = calls[node]
            operand = call.operands[call.placeholders.index(node)]
            call.drop_operand(node)
            waiting += [operand] if isinstance(operand, fx.Node) else []
        elif node in numbering.effects and numbering.effects[node].kind is Kind.PURE:
            waiting += node.all_input_nodes
            node.graph.erase_node(node)
            erased += 1
    return erased
