"""Higher-order operators and their bodies: finding them, and passing one more operand in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from glue_compiler.fx.values import inputs_of, is_call

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
"""What Dynamo makes of a checkpoint."""

# Operators that run their body once, at the call, on their operands in order; with the index of the first operand.
_RUN_ONCE = {
    "tag_activation_checkpoint": 1,
    "wrap_activation_checkpoint": 1,
    "wrap": 1,
    "invoke_subgraph": 2,  # (body, identifier, *operands)
}


@dataclass(frozen=True)
class BodyCall:
    """One call of a higher-order operator whose body runs exactly once.

    ``operands[i]`` is bound to ``placeholders[i]`` of ``body``.
    """

    node: fx.Node
    body: fx.GraphModule
    first_operand: int

    @property
    def operands(self) -> tuple[fx.node.Argument, ...]:
        return self.node.args[self.first_operand :]

    @property
    def placeholders(self) -> list[fx.Node]:
        return inputs_of(self.body.graph)

    def append_operand(self, value: fx.Node) -> fx.Node:
        """Pass ``value``, a node of the caller's graph, into the body; returns the body's new placeholder."""
        self.node.args = (*self.node.args, value)
        placeholders = self.placeholders
        last = placeholders[-1] if placeholders else None
        graph = self.body.graph
        with graph.inserting_after(last) if last else graph.inserting_before(next(iter(graph.nodes))):
            placeholder = graph.placeholder(value.name)
        # Code binds one parameter, called as its target, after the other to a variable called as the node: one's name
        # may be the other's target.
        placeholder.target = placeholder.name
        placeholder.meta.update({k: v for k, v in value.meta.items() if k in ("example_value", "val", "stack_trace")})
        return placeholder

    def drop_operand(self, placeholder: fx.Node) -> None:
        """No longer pass what is bound to ``placeholder``, which nothing in the body uses."""
        position = self.first_operand + self.placeholders.index(placeholder)
        self.node.args = self.node.args[:position] + self.node.args[position + 1 :]
        self.body.graph.erase_node(placeholder)


def is_higher_order(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)


def bodies_of(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The graph modules that a node takes as arguments."""
    found = []
    for arg in node.all_input_nodes:
        if arg.op == "get_attr":
            attribute = attribute_of(gm, arg)
            if isinstance(attribute, fx.GraphModule):
                found.append(attribute)
    return found


def attribute_of(gm: fx.GraphModule, node: fx.Node) -> object | None:
    """What a get_attr node names, or None if it names nothing."""
    value: object = gm
    for part in str(node.target).split("."):
        if not hasattr(value, part):
            return None
        value = getattr(value, part)
    return value


def set_attribute(root: torch.nn.Module, path: str, value: object) -> None:
    """Make ``path`` name ``value`` below ``root``, as a get_attr node reads it."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, torch.nn.Module())
        root = getattr(root, parent)
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)


def body_calls(gm: fx.GraphModule) -> dict[fx.Node, BodyCall]:
    """The calls in one graph whose body runs once, at that call, and belongs to that call alone."""
    times_used = Counter(id(body) for node in gm.graph.nodes if is_higher_order(node) for body in bodies_of(gm, node))
    return {
        call.node: call
        for call in run_once_calls(gm)
        if times_used[id(call.body)] == 1
        and len(call.operands) == len(call.placeholders)
        and not any(isinstance(value, fx.Node) for value in call.node.kwargs.values())
    }


def run_once_calls(gm: fx.GraphModule) -> Iterator[BodyCall]:
    """Every call of an operator that runs its one body once."""
    first_operands = {getattr(torch.ops.higher_order, name, None): index for name, index in _RUN_ONCE.items()}
    for node in gm.graph.nodes:
        if is_higher_order(node) and node.target in first_operands and len(bodies_of(gm, node)) == 1:
            yield BodyCall(node, bodies_of(gm, node)[0], first_operands[node.target])


def graph_modules(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """``gm`` and all graph modules inside it, each once."""
    return (module for module in gm.modules() if isinstance(module, fx.GraphModule))


def count_nodes(gm: fx.GraphModule) -> int:
    """Operator calls in a graph and its bodies (placeholders, attributes and outputs are not counted)."""
    return sum(is_call(node) for module in graph_modules(gm) for node in module.graph.nodes)
