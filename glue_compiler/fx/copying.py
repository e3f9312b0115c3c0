"""Copies of graphs."""

from __future__ import annotations

import copy
from typing import TypeGuard

import torch
from torch import fx

from glue_compiler.compat import tracing
from glue_compiler.fx.bodies import attribute_of, set_attribute


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy whose nodes have metadata dictionaries of their own, with the same values in them; and node → copy.

    Names stay: they are what a report calls a node by.
    """
    copied = fx.Graph(tracer_cls=graph._tracer_cls)
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copied.node_copy(node, lambda operand: mapping[operand])
        tracing.copy_node_attributes(node, mapping[node])
    for node, copy_of_node in mapping.items():
        tracing.set_name(copy_of_node, node.name)
    copied._codegen = copy.copy(graph._codegen)
    return copied, mapping


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Copies of a graph and of its bodies, over the same tensors: AOTAutograd takes ownership of what it compiles."""
    return _copy_module(gm, {})


def _copy_module(gm: fx.GraphModule, copies: dict[int, fx.GraphModule]) -> fx.GraphModule:
    if id(gm) not in copies:  # a body may belong to several calls
        root = torch.nn.Module()
        for node in gm.graph.find_nodes(op="get_attr"):
            value = attribute_of(gm, node)
            if value is not None:
                set_attribute(root, str(node.target), _copy_module(value, copies) if _is_graph(value) else value)
        copies[id(gm)] = fx.GraphModule(root, copy_graph(gm.graph)[0])
        copies[id(gm)].meta.update(gm.meta)
    return copies[id(gm)]


def _is_graph(value: object) -> TypeGuard[fx.GraphModule]:
    return isinstance(value, fx.GraphModule)
