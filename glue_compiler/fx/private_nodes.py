"""The nodes between the operands and the result of a rewrite: nothing else may need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import fx

from glue_compiler.fx.effects import Kind
from glue_compiler.fx.operators import Operators, Value
from glue_compiler.fx.values import is_call

_MOST_LEFT_OVER = 16
"""Nodes that nothing needs, behind one: a limit for the search alone."""


def left_over(node: fx.Node, operators: Operators) -> dict[fx.Node, None]:
    """``node`` and all that is made of it, if nothing needs it, as bodies have it: a view of which a model has read the
    sizes, the indices of a maximum. Empty: something does, or it is more than is looked at."""
    found, waiting = {node: None}, [node]
    while waiting:
        effects = operators.numbering.effects.get(waiting[-1])
        if effects is None or effects.kind is not Kind.PURE or len(found) > _MOST_LEFT_OVER:
            return {}
        further = [user for user in waiting.pop().users if user not in found]
        found |= dict.fromkeys(further)
        waiting += further
    return found


def readers_of(value: Value, operators: Operators) -> Iterator[fx.Node]:
    """What takes ``value`` and is needed itself: from the node that makes it, from another that stands for it, or from
    one whose memory it was written to."""
    node = operators.node_of(value)
    effects = operators.numbering.effects.get(node) if node is not None else None
    waiting = [] if node is None else [node, *(node.all_input_nodes if effects is not None and effects.writes else [])]
    while waiting:
        holder = waiting.pop()
        for user in holder.users:
            if operators.read(holder, user) != value:
                continue
            if is_call(user) and operators.value(user) == value:
                waiting.append(user)
            elif not left_over(user, operators):
                yield user


def nodes_used_alone(
    between: Iterable[fx.Node],
    output: fx.Node,
    operators: Operators,
    is_harmless: Callable[[fx.Node, fx.Node], bool] = lambda user, node: False,
) -> tuple[fx.Node, ...] | fx.Node:
    """The nodes ``between`` the operands of a rewrite and ``output``, with those that stand for the same values, last
    first; or a node that uses one of them, where something other than ``output`` needs one.

    Args:
        is_harmless: may this user of a node stay as it is?
    """
    inside = dict.fromkeys(between)
    values = {operators.value(node) for node in inside}
    waiting = list(inside)
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user is output or user in inside or is_harmless(user, node):
                continue
            if unneeded := left_over(user, operators):
                inside |= unneeded
                continue
            if not is_call(user) or operators.value(user) not in values:
                return user
            inside[user] = None
            waiting.append(user)
    return tuple(node for node in reversed(output.graph.nodes) if node in inside)
