"""Applies a plan: the prologue becomes a graph of its own, its results become inputs of the rest."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import graph_inputs, tracing
from glue_compiler.fx.copying import copy_graph
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.structure import structure_of
from glue_compiler.fx.values import inputs_of, is_call, value_of
from glue_compiler.passes.memoize_metadata.analysis import ProloguePlan
from glue_compiler.passes.memoize_metadata.host_reads import read_together
from glue_compiler.pipeline.results import Prologue


def split_off(gm: fx.GraphModule, plan: ProloguePlan, effects: EffectAnalysis) -> Prologue:
    """Take ``plan`` out of ``gm``, in place. ``gm`` keeps all its inputs, and takes the results after them."""
    placeholders = inputs_of(gm.graph)
    positions = tuple(placeholders.index(node) for node in plan.inputs)
    asserts = {node for node in plan.nodes if effects.of(gm, node).kind is Kind.ASSERT}
    graph, results, key = _prologue_graph(plan, asserts, effects.fake_mode)
    gm.graph = _rest_of_graph(gm, plan, results, effects)
    return Prologue(fx.GraphModule(torch.nn.Module(), graph), positions, tuple(results.values()), key)


def _prologue_graph(
    plan: ProloguePlan, asserts: set[fx.Node], fake_mode: Any
) -> tuple[fx.Graph, dict[str, Any], Hashable]:
    """The graph; its results' fake values, by the names that they have as inputs of the rest; its structure."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*plan.inputs, *plan.nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        tracing.copy_node_attributes(node, copies[node])
    outputs = [copies[node] for node in plan.results]
    results = {f"batch_{node.name}": value_of(node) for node in plan.results}
    for size in plan.sizes:
        node = graph.call_function(torch.ops.aten.sym_size.int, (copies[size.tensor], size.dimension))
        node.meta["example_value"] = value_of(size.tensor).shape[size.dimension]
        outputs.append(node)
        results[f"batch_{size.tensor.name}_size_{size.dimension}"] = node.meta["example_value"]
    graph.output(tuple(outputs))
    kept = {copies[node] for node in asserts}
    for node in reversed(graph.nodes):
        if is_call(node) and not node.users and node not in kept:
            graph.erase_node(node)
    read_together(graph, fake_mode)
    return graph, results, structure_of(graph, kept)


def _rest_of_graph(
    gm: fx.GraphModule, plan: ProloguePlan, results: dict[str, Any], effects: EffectAnalysis
) -> fx.Graph:
    # A copy, because Dynamo goes on reading its own graph's inputs after the backend has returned.
    graph, copies = copy_graph(gm.graph)
    computed = {name: copies[node] for name, node in zip(results, plan.results, strict=False)}
    last = inputs_of(graph)[-1]
    inputs: dict[str, fx.Node] = {}
    for name, value in results.items():
        with graph.inserting_after(last):
            last = inputs[name] = graph.placeholder(name)
        last.meta["example_value"] = value
        graph_inputs.set_sourceless(last)
    # Sizes have no users: they bind a symbol by being inputs.
    for name, node in computed.items():
        node.replace_all_uses_with(inputs[name])
    returned = {copies[node] for node in plan.returned}
    for name, node in computed.items():
        if node in returned:
            _copy_before_use(inputs[name], last, effects)
    for node in reversed(plan.nodes):
        if not copies[node].users:
            graph.erase_node(copies[node])
    return graph


def _copy_before_use(placeholder: fx.Node, last: fx.Node, effects: EffectAnalysis) -> None:
    """Whoever gets the graph's output may write to it; the memo's own tensor must not change."""
    with placeholder.graph.inserting_after(last):
        copy = placeholder.graph.call_method("clone", (placeholder,))
    placeholder.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    copy.meta["example_value"] = value_of(placeholder)
    copy.meta["example_value"] = effects.result_of(None, copy)  # the same, in memory of its own
