"""A graph with the logits that were taken out of its outputs, as one graph again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from glue_compiler.fx.copying import copy_graph
from glue_compiler.fx.values import inputs_of

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
    inputs: Any = inputs_of(graph)
    outputs: Any = output.args[0]
    tracer = GraphAppendingTracer(graph)
    results = list(outputs[: deferred[0].keeps])

    def found(operands: Sequence[Operand]) -> list[Any]:
        nodes = ((inputs if each.kind == "input" else outputs)[each.position] for each in operands)
        proxies = (fx.Proxy(node, tracer) for node in nodes)
        return [proxy.detach() if each.detached else proxy for each, proxy in zip(operands, proxies, strict=True)]

    with graph.inserting_before(output):
        for each in deferred:
            rows, weights, biases = map(found, (each.rows, each.weights, each.biases))
            results[each.position] = each.head.stages(rows, weights, biases, keep=True)[-1].node
    output.args = (tuple(results),)
    return fx.GraphModule(gm, graph)
