"""Writes one call of ``glue.counted_loop`` for all steps from 1 on."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.values import value_of
from glue_compiler.ops.counted_loop import add_body
from glue_compiler.passes.roll_loops.read import EqualSteps, Number


def write(gm: fx.GraphModule, steps: EqualSteps, effects: EffectAnalysis) -> None:
    """``steps`` are proved. Nodes of step 0 stay as they are."""
    tensors = [node for node in steps.fixed if isinstance(value_of(node), torch.Tensor)]
    sizes = [node for node in steps.fixed if node not in set(tensors)]
    name = add_body(_body(steps, [*tensors, *sizes]), steps.autocast)
    maker = NodeMaker(effects.fake_mode)
    start = steps.second[0]
    outside = {node: [user for user in node.users if user not in steps.arguments] for node in steps.second}
    for state in steps.states:
        if state.first is state.second:
            outside[state.second] = _later(state.second, start)
    with maker.before(start, effects.mode_of(gm, start), source=start):
        count = steps.count if isinstance(steps.count, int) else maker.size(*steps.count)
        states = [state.first for state in steps.states]
        call = maker.call(torch.ops.glue.counted_loop.default, name, count, states, tensors, sizes)
        ends = [maker.call(operator.getitem, call, i) for i in range(len(states))]
    for state, end in zip(steps.states, ends, strict=True):
        for user in outside[state.second]:
            user.replace_input_with(state.second, end)
    for node in reversed(steps.second):
        gm.graph.erase_node(node)


def _later(node: fx.Node, start: fx.Node) -> list[fx.Node]:
    """Who uses ``node`` after the loop, step 1 of which begins with ``start``."""
    return [user for user in node.users if start < user]


def _body(steps: EqualSteps, fixed: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    number = graph.placeholder("number")
    known = {state.first: graph.placeholder(f"state_{i}") for i, state in enumerate(steps.states)}
    known |= {node: graph.placeholder(f"fixed_{i}") for i, node in enumerate(fixed)}

    def argument(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(argument, value))
        if isinstance(value, dict):
            return {key: argument(each) for key, each in value.items()}
        if isinstance(value, slice):
            return slice(*map(argument, (value.start, value.stop, value.step)))
        return number if isinstance(value, Number) else known[value] if isinstance(value, fx.Node) else value

    for i, node in enumerate(each for each in steps.second if each in steps.needed):
        args, kwargs = steps.arguments[node]
        known[node] = graph.create_node(node.op, node.target, argument(args), argument(kwargs), name=f"made_{i}")
    graph.output(tuple(known[state.second] for state in steps.states))
    return fx.GraphModule(torch.nn.Module(), graph)
