"""Copies of graphs."""

from __future__ import annotations

import copy

from torch import fx

from glue_compiler import compat


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy whose nodes have metadata dictionaries of their own, with the same values in them; and node → copy."""
    copied = fx.Graph(tracer_cls=graph._tracer_cls)
    mapping: dict[fx.Node, fx.Node] = {}
    output = copied.graph_copy(graph, mapping)
    old_output = graph.output_node()
    copied.output(output, old_output.type).meta = copy.copy(old_output.meta)
    copied._codegen = copy.copy(graph._codegen)
    for node, copy_of_node in mapping.items():
        compat.copy_node_attributes(node, copy_of_node)
    return copied, mapping
