"""Graphs inside of graphs that Inductor compiles once, however often they are called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx


def add_body(gm: fx.GraphModule, graph: fx.Graph, prefix: str) -> str:
    """Make ``graph`` a body of ``gm``; returns its name there."""
    number = 0
    while hasattr(gm, f"{prefix}_{number}"):
        number += 1
    name = f"{prefix}_{number}"
    gm.register_module(name, fx.GraphModule(torch.nn.Module(), graph))
    return name


def call_body(graph: fx.Graph, body: fx.Node, identifier: str, operands: Sequence[fx.Node]) -> fx.Node:
    """``body``, a get_attr node, called with ``operands``; equal identifiers stand for equal bodies."""
    return graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, identifier, *operands))
