"""What a test says about a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.fx import bodies
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.operators import Operators, Value
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.pipeline.results import Numerics
from glue_compiler.report import dump
from glue_compiler.report.dump import graphs_in
from glue_compiler.testing.pass_runs import PassRun
from glue_compiler.verify import runs
from glue_compiler.verify.compare import find_mismatch
from glue_compiler.verify.inputs import record_inputs


class GraphAssertionError(AssertionError):
    """A claim about a graph that does not hold. ``difference``: what changed, as text to read; may be empty."""

    def __init__(self, message: str, difference: str = "") -> None:
        super().__init__(message)
        self.difference = difference


Graph = fx.GraphModule | TrainingPair


def find(graph: Graph, *targets: Any) -> list[fx.Node]:
    """The calls of these functions, or of methods of these names, in a graph (or pair) and its bodies, in order."""
    return [
        node
        for module in _modules(graph)
        for node in module.graph.nodes
        if node.op.startswith("call_") and node.target in targets
    ]


def count_ops(graph: Graph, *targets: Any) -> int:
    """How many there are of those; without ``targets``, of all operators."""
    if not targets:
        return sum(node.op.startswith("call_") for module in _modules(graph) for node in module.graph.nodes)
    return len(find(graph, *targets))


def operators_of(graph: fx.GraphModule) -> list[str]:
    """What a captured graph and its bodies call, as passes read it: a line an operator, with the arguments that it has
    by its schema. A tensor is shown by the name of the node that makes it."""
    numbering = number_values(graph, analysis := EffectAnalysis.for_graph(graph))
    operators = Operators(numbering, analysis)

    def shown(item: Any) -> str:
        if isinstance(item, tuple):
            return f"[{', '.join(map(shown, item))}]"
        return item.node.name if isinstance(item, Value) else str(item)

    return [
        f"{node.name} = {call.overload}({', '.join(f'{name}={shown(item)}' for name, item in call.arguments.items())})"
        for scope in numbering.scopes
        for node in scope.graph.nodes
        for call in operators.calls(node) or ()
    ]


def _modules(graph: Graph) -> Iterator[fx.GraphModule]:
    for root in (graph.forward, graph.backward) if isinstance(graph, TrainingPair) else (graph,):
        yield from bodies.graph_modules(root)


def assert_rewritten(result: PassRun, times: int | None = None) -> None:
    """The pass changed the graph; with ``times``, by so many single rewrites.

    Raises:
        GraphAssertionError: with what was skipped and why.
    """
    if not result.report.changed:
        skips = "".join(f"\n  left alone: {reason}" for reason in result.skip_reasons)
        raise GraphAssertionError(f"{result.report.name} changed nothing{skips}", render(result.before))
    if times is not None and len(result.rewrites) != times:
        done = "".join(f"\n  {what}" for what in result.rewrites)
        message = f"{result.report.name} made {len(result.rewrites)} single rewrites, not {times}:{done}"
        raise GraphAssertionError(message, difference(result.before, result.after))


def assert_untouched(result: PassRun, reason: str | None = None) -> None:
    """The pass left the graph as it was; with ``reason``, one of its skips says so.

    Raises:
        GraphAssertionError: with what it did, or the reasons that it gave.
    """
    if result.report.changed:
        done = "".join(f"\n  {what}" for what in result.rewrites)
        message = f"{result.report.name} rewrote the graph:{done}"
        raise GraphAssertionError(message, difference(result.before, result.after))
    if reason is not None and not any(reason in given for given in result.skip_reasons):
        given = "".join(f"\n  {each}" for each in result.skip_reasons) or " none"
        raise GraphAssertionError(f"{result.report.name} gives no reason with {reason!r}; reasons:{given}")


def assert_equivalent(
    before: Callable[..., Any] | TrainingPair,
    after: Callable[..., Any] | TrainingPair,
    inputs: Sequence[Any],
    grads: bool = True,
    numerics: Numerics = Numerics.BITWISE,
) -> None:
    """Both give the same outputs, leave the same in their inputs, and give the same gradients, for random directions.

    Each runs on copies of ``inputs``, from the same state of the random generators.

    Args:
        before, after: graphs, pairs, or any callables. A pair takes the inputs of its forward, then the gradients of
            its outputs.
        inputs: tensors and numbers, in the order of the placeholders.
        grads: compare gradients of the inputs that need one (of a pair they are among the outputs).
        numerics: ``CLOSE``: within the rounding of the dtype.

    Raises:
        GraphAssertionError: names the first output, input or gradient that differs, and by how much.
    """
    recorded = record_inputs(inputs)
    states = runs.random_states(inputs)
    names = [str(number) for number in range(len(inputs))]
    results = []
    for graph in (before, after):
        with runs.random_state(inputs, states):
            results.append(runs.run(_callable(graph), recorded, names, gradients=grads))
    expected, actual = ((*each.forward, *each.gradients) for each in results)
    if found := find_mismatch(expected, actual, numerics):
        shown = difference(before, after) if isinstance(before, Graph) and isinstance(after, Graph) else ""
        raise GraphAssertionError(f"{found.name}: {found.reason}", shown)


def _callable(graph: Callable[..., Any] | TrainingPair) -> Callable[..., Any]:
    if isinstance(graph, fx.GraphModule):
        return runs.eager_reference(copy_graph_module(graph))
    return _step(graph) if isinstance(graph, TrainingPair) else graph


def _step(pair: TrainingPair) -> Callable[..., Any]:
    inputs = len(pair.forward.graph.find_nodes(op="placeholder"))
    names = [value.name if isinstance(value, fx.Node) else None for value in pair.returned[pair.num_outputs :]]
    taken = [node.name for node in pair.backward.graph.find_nodes(op="placeholder")]

    def step(*arguments: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            results = pair.forward(*arguments[:inputs])
            saved = dict(zip(names, results[pair.num_outputs :], strict=True))
            gradients = iter(arguments[inputs:])
            returned = pair.backward(*(saved[name] if name in saved else next(gradients) for name in taken))
        return (*results[: pair.num_outputs], *returned)

    return step


def render(graph: Graph) -> str:
    """The graph as Python code."""
    return graphs_in(dump.render(graph))


def difference(before: Graph, after: Graph) -> str:
    """A unified diff of two graphs as Python code."""
    return "\n".join(dump.difference(render(before), render(after)))
