"""Graphs inside of graphs that Inductor compiles once, however often they are called."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

BODY = "shared_layer"
"""How the names of bodies begin."""


def add_body(gm: fx.GraphModule, graph: fx.Graph, where: str) -> str:
    """Make ``graph`` a body of ``gm``, which is ``"forward"`` or ``"backward"``; returns its name in both."""
    _keep_operands()
    number = 0
    while hasattr(gm, f"{BODY}_{where}_{number}"):
        number += 1
    name = f"{BODY}_{where}_{number}"
    gm.register_module(name, fx.GraphModule(torch.nn.Module(), graph))
    return name


def call_body(graph: fx.Graph, body: fx.Node, identifier: str, operands: Sequence[fx.Node]) -> fx.Node:
    """``body``, a get_attr node, called with ``operands``; equal identifiers stand for equal bodies."""
    return graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, identifier, *operands))


def inline_bodies(gm: fx.GraphModule) -> None:
    """For a graph whose operators run one by one: each is freed what it was the last to use, as without bodies.

    The operator itself would look for gradients, and mark results as views.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        body, _, *operands = node.args
        if not str(body.target).startswith(BODY):
            continue
        graph = getattr(gm, body.target).graph
        with gm.graph.inserting_before(node):
            inputs = dict(zip(graph.find_nodes(op="placeholder"), operands, strict=True))
            results: Any = gm.graph.graph_copy(graph, inputs)
        for item in list(node.users):
            item.replace_all_uses_with(results[item.args[1]])
            gm.graph.erase_node(item)
        gm.graph.erase_node(node)
    gm.recompile()


def why_no_bodies(options: Mapping[str, Any]) -> str:
    """Why Inductor cannot compile a graph with bodies, with its own ``options`` or by its config; ``""`` if it can."""
    from torch._inductor import compile_fx, config

    if options.get("triton.cudagraphs", config.triton.cudagraphs):
        return "CUDA graphs are on, which bodies were not tried with"
    if options.get("cpp_wrapper", config.cpp_wrapper):
        return "Inductor's cpp_wrapper is on, which has no calls of bodies"
    if compile_fx.fx_compile_mode is not compile_fx.FxCompileMode.NORMAL:
        return "Inductor compiles in another process, where the operands of bodies could be overwritten"
    return ""


def _keep_operands() -> None:
    """Inductor must not overwrite what a body of ours takes.

    A backward graph may overwrite its inputs of certain numbers, and 2.11 and 2.13 take a body's operands of the same
    numbers for those (mended in pytorch/pytorch#193960). The attribute is cleared as it is cleared there.
    """
    from torch._inductor.graph import SubgraphLowering

    lower = SubgraphLowering.__init__
    if hasattr(lower, "_keeps_operands"):
        return

    @functools.wraps(lower)
    def keep(self: Any, parent: Any, *args: Any, **kwargs: Any) -> None:
        lower(self, parent, *args, **kwargs)
        if BODY in self.name:
            self.bw_donated_idxs = None

    keep._keeps_operands = True  # type: ignore[attr-defined]
    SubgraphLowering.__init__ = keep  # type: ignore[method-assign]
