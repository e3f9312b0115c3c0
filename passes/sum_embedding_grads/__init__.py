"""sum_embedding_grads: the gradient of a large table in 16 bits is summed without a second table in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import fx

from glue_compiler.fx import bodies
from glue_compiler.passes.sum_embedding_grads.read import Embedding, find_embeddings
from glue_compiler.pipeline.graph_pass import GraphPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics, Skip


class SumEmbeddingGrads(GraphPass):
    """Leave the gradients of embeddings to torch's kernel, where Inductor would sum them in a table of fp32.

    Counts: ``embeddings``.
    """

    name: ClassVar[str] = "sum_embedding_grads"
    numerics: ClassVar[Numerics] = Numerics.CLOSE

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        count = 0
        skips: list[Skip] = []
        for module in bodies.graph_modules(graph):
            found, left = find_embeddings(module, context.effects)
            skips += left
            chosen = list(context.fuel.allowed((f"sum the gradient of {each.node.name}", each) for each in found))
            written: dict[fx.Node, fx.Node] = {}
            for each in chosen:
                written[each.node] = _write(module.graph, each, written)
            if chosen:
                module.recompile()
            count += len(chosen)
        return PassResult(count > 0, {"embeddings": count}, tuple(skips))


def _write(graph: fx.Graph, found: Embedding, written: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """``written``: what stands in place of the embeddings before it, any of which may be its table."""
    node, weight = found.node, written.get(found.weight, found.weight)
    with graph.inserting_before(node):
        call = graph.call_function(torch.ops.glue.embedding.default, (weight, found.indices, *found.settings))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)
    return call
