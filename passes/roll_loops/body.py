"""Makes the graph of one of many equal steps, and reads what its gradients are computed from."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.symbols import speculation
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.flow import Refused
from glue_compiler.fx.values import (
    expressions_of,
    makes_tensor,
    requires_grad,
    storages_of,
    tensors_in,
    value_of,
    values_of,
)
from glue_compiler.ops.loop_gradients import StepGradients, step_gradients
from glue_compiler.passes.roll_loops.read import EqualSteps, Number


@dataclass(frozen=True)
class Body:
    """A step as a graph of its own, and the nodes that are its operands, besides its number."""

    graph: fx.GraphModule
    states: list[fx.Node]
    fixed: list[fx.Node]
    sizes: list[fx.Node]
    gradients: StepGradients


@dataclass
class Bodies:
    """Makes the bodies of one graph's loops, in which layers repeat them."""

    effects: EffectAnalysis
    _known: dict[Any, StepGradients] = field(default_factory=dict)

    def of(self, gm: fx.GraphModule, steps: EqualSteps) -> Body:
        """
        Raises:
            Refused: it is not known what its gradients are computed from, or that is written before they are.
        """
        states = [state.first for state in steps.states]
        fixed = [node for node in steps.fixed if makes_tensor(node)]
        sizes = [node for node in steps.fixed if node not in set(fixed)]
        graph = _graph(steps, [*fixed, *sizes])
        body = Body(graph, states, fixed, sizes, self._gradients(graph, steps, states, fixed, sizes))
        if any(requires_grad(value_of(state.second)) for state in steps.states):
            operands = [*states, *fixed]
            saved = body.gradients.saved([requires_grad(value_of(node)) for node in operands])
            memory = storages_of([value_of(operands[i]) for i in saved])
            later = itertools.takewhile(lambda node: node is not steps.second[-1], reversed(gm.graph.nodes))
            if any(memory & self.effects.of(gm, node).writes for node in later):
                raise Refused("what its gradients are computed from is written after it")
        return body

    def _gradients(self, graph: fx.GraphModule, steps: EqualSteps, *operands: list[fx.Node]) -> StepGradients:
        values = [values_of(nodes) for nodes in operands]
        kinds = [(tensor.dim(), tensor.dtype, tensor.device) for tensor in tensors_in(values)]
        targets = [node.target for node in graph.graph.nodes]
        key = (graph.code, *targets, steps.autocast, *kinds, *expressions_of(values))
        if key not in self._known:
            fake_mode = self.effects.fake_mode
            with contextlib.ExitStack() as stack:
                stack.enter_context(speculation(fake_mode, getattr(fake_mode, "shape_env", None)))
                for arguments in steps.autocast:
                    stack.enter_context(torch.autocast(*arguments))
                try:
                    self._known[key] = step_gradients(graph, *values)
                except Exception as error:
                    raise Refused(f"its gradients are not known: {error}") from None
        return self._known[key]


def _graph(steps: EqualSteps, fixed: list[fx.Node]) -> fx.GraphModule:
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
