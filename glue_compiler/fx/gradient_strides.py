"""Who sees the strides of gradients: a rewrite may give others than the operators that it replaces."""

from __future__ import annotations

import operator

import torch
from torch import fx

from glue_compiler.fx.operators import Operators
from glue_compiler.fx.values import is_call, requires_grad, value_of

aten = torch.ops.aten

_PRODUCTS = (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum)
"""Their gradients are products too: what they are laid out as does not depend on how the result's gradient is."""


def strides_are_seen(nodes: list[fx.Node], operators: Operators) -> bool:
    """Does code that is not torch's own get the gradients of ``nodes``, and so their strides?

    A hook, an ``autograd.Function`` or a custom operator before them, with no product between: its backward may take a
    ``view`` for which only the strides that eager's gradients have are fit.
    """
    seen: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in seen or not requires_grad(value_of(node)):
            continue
        seen.add(node)
        body = operators.body_of(node)
        if body is not None:
            waiting += body.graph.output_node().all_input_nodes
        elif node.op == "placeholder":
            outer = operators.passed(operators.value(node))
            waiting += [outer.node] if outer is not None else []
        elif is_call(node):
            calls = operators.calls(node)
            if calls is None and node.target is not operator.getitem:
                return True
            if any(call.overload.namespace not in ("aten", "prims") for call in calls or ()):
                return True
            if not any(call.operator in _PRODUCTS for call in calls or ()):
                waiting += node.all_input_nodes
    return False
