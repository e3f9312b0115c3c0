"""A graph with the logits that were taken out of its outputs, as one graph again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.nn import functional

from glue_compiler.fx import bodies
from glue_compiler.fx.copying import copy_graph

if TYPE_CHECKING:
    from glue_compiler.deferred.outputs import DeferredOutput, Operand


def join_deferred(gm: fx.GraphModule, deferred: Sequence[DeferredOutput]) -> fx.GraphModule:
    """What a caller gets who reads all ``deferred`` outputs of ``gm`` at once; ``gm`` itself if there are none.

    The bodies and attributes are those of ``gm``, and not copied.
    """
    if not deferred:
        return gm
    graph, _ = copy_graph(gm.graph)
    output = graph.output_node()
    inputs, outputs = graph.find_nodes(op="placeholder"), output.args[0]
    assert isinstance(outputs, tuple | list)
    results = list(outputs[: deferred[0].keeps])

    def found(operands: Sequence[Operand]) -> list[fx.Node]:
        nodes = []
        for operand in operands:
            node = (inputs if operand.kind == "input" else outputs)[operand.position]
            assert isinstance(node, fx.Node)
            nodes.append(graph.call_method("detach", (node,)) if operand.detached else node)
        return nodes

    with graph.inserting_before(output):
        for each in deferred:
            results[each.position] = _logits(graph, each, found(each.rows), found(each.weights), found(each.biases))
    output.args = (tuple(results),)
    root = torch.nn.Module()
    for node in gm.graph.find_nodes(op="get_attr"):
        bodies.set_attribute(root, str(node.target), bodies.attribute_of(gm, node))
    return fx.GraphModule(root, graph)


def _logits(
    graph: fx.Graph,
    deferred: DeferredOutput,
    rows: Sequence[fx.Node],
    weights: Sequence[fx.Node],
    biases: Sequence[fx.Node],
) -> fx.Node:
    """See :class:`glue_compiler.deferred.head.Head`."""
    total: fx.Node | None = None
    remaining = iter(biases)
    for term, row, weight in zip(deferred.head.terms, rows, weights, strict=True):
        operands = [row, weight, *([next(remaining)] if term.has_bias else [])]
        if term.dtype is not None:
            operands = [graph.call_method("to", (operand, term.dtype)) for operand in operands]
        product = graph.call_function(functional.linear, tuple(operands))
        if term.scale is not None:
            product = graph.call_method("mul", (product, term.scale))
        total = product if total is None else graph.call_method("add", (total, product))
    assert total is not None
    for step in deferred.head.steps:
        match step.kind:
            case "multiply":
                total = graph.call_method("mul", (total, step.factor))
            case "divide":
                total = graph.call_method("div", (total, step.factor))
            case "tanh":
                total = graph.call_method("tanh", (total,))
            case "cast":
                total = graph.call_method("to", (total, step.dtype))
    return total
