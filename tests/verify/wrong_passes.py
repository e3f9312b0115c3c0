"""Passes that are wrong on purpose, one for each stage, and a model on which exactly one rewrite of each is."""

import torch

from glue_compiler.pipeline.graph_pass import GraphPass, PairPass, PassResult
from glue_compiler.pipeline.results import Numerics
from glue_compiler.testing import find


class RenameFunctions(GraphPass):
    """Writes ``tanh`` as a function, which is right, and ``sin`` as ``cos``, which is not. One rewrite for each."""

    name, numerics = "rename_functions", Numerics.BITWISE

    def run(self, graph, context):
        renamed = 0
        for node in find(graph, "tanh", "sin"):
            if not context.fuel.take(f"rename {node.name}"):
                break
            node.op = "call_function"
            node.target = torch.tanh if node.target == "tanh" else torch.cos
            renamed += 1
        graph.recompile()
        return PassResult(changed=renamed > 0, counts={"renamed": renamed})


class DropNegations(PairPass):
    """In backward: replaces ``-(-x)`` by ``x``, which is right, and one other ``-x`` too."""

    name, numerics = "drop_negations", Numerics.BITWISE

    def run_pair(self, pair, context):
        dropped = 0
        for node in find(pair.backward, torch.ops.aten.neg.default):
            if not context.fuel.take(f"drop {node.name}"):
                break
            node.replace_all_uses_with(node.args[0])
            pair.backward.graph.erase_node(node)
            dropped += 1
        pair.backward.recompile()
        return PassResult(changed=dropped > 0, counts={"dropped": dropped})


def model(x, weight):
    """Four tanh and one sin: the third rewrite of :class:`RenameFunctions` is wrong."""
    x = (x @ weight).tanh().tanh()
    x = x.sin()
    return (x @ weight).tanh().tanh()


def cosine(x, weight):
    """Its backward holds one negation, of a sine."""
    return (x @ weight).cos() * 2


def inputs():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), weight.requires_grad_()
