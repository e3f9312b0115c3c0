"""Writes one call of ``glue.counted_loop`` for all steps from 1 on."""

from __future__ import annotations

import operator

import torch
from torch import fx

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.ops.counted_loop import add_body
from glue_compiler.passes.roll_loops.body import Body
from glue_compiler.passes.roll_loops.read import EqualSteps


def write(gm: fx.GraphModule, steps: EqualSteps, body: Body, effects: EffectAnalysis) -> None:
    """``steps`` are proved, and run ``body``. Nodes of step 0 stay as they are."""
    name = add_body(body.graph, body.gradients, steps.autocast)
    maker = NodeMaker(effects.fake_mode)
    start = steps.second[0]
    outside = {node: [user for user in node.users if user not in steps.arguments] for node in steps.second}
    for state in steps.states:
        if state.first is state.second:
            outside[state.second] = _later(state.second, start)
    with maker.before(start, effects.mode_of(gm, start), source=start):
        count = steps.count if isinstance(steps.count, int) else maker.size(*steps.count)
        operands = body.states, body.fixed, body.sizes
        call = maker.call(torch.ops.glue.counted_loop.default, name, count, *operands)
        ends = [maker.call(operator.getitem, call, i) for i in range(len(body.states))]
    for state, end in zip(steps.states, ends, strict=True):
        for user in outside[state.second]:
            user.replace_input_with(state.second, end)
    for node in reversed(steps.second):
        gm.graph.erase_node(node)


def _later(node: fx.Node, start: fx.Node) -> list[fx.Node]:
    """Who uses ``node`` after the loop, step 1 of which begins with ``start``."""
    return [user for user in node.users if start < user]
