"""Writes dequantisations by glue's operator, and products of ATen's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.modes import Mode
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.values import value_of
from glue_compiler.passes.fuse_dequantization.read import Call, Product

aten = torch.ops.aten
_KEPT = ("val", "stack_trace", "nn_module_stack")


def write(gm: fx.GraphModule, calls: Sequence[Call], fake_mode: Any) -> None:
    """The node of a call stays, and calls another operator: backward takes what is saved by its name."""
    nodes = NodeMaker(fake_mode, key="val")
    for call in calls:
        given = call.scales
        nested = (given.codes, given.table, given.offset) if given.codes is not None else ()
        dequantization = (call.packed, given.scales, call.block, list(call.shape), call.dtype, *nested)
        if call.product is None:
            call.node.target, call.node.args = torch.ops.glue.dequantize_nf4.default, dequantization
        else:
            with nodes.before(call.node, Mode(), call.node):
                weight = nodes.call(torch.ops.glue.dequantize_nf4.default, *dequantization)
                call.node.args = _product(nodes, call.product, weight)
            call.node.target = aten.view.default
        call.node.kwargs = {}
        # What else is on record, such as operands as they were in eager code, is of the operator that it was.
        call.node.meta = {key: value for key, value in call.node.meta.items() if key in _KEPT}
    if calls:
        gm.graph.eliminate_dead_code()  # scales that the kernel dequantises
        gm.recompile()


def _product(nodes: NodeMaker, product: Product, weight: fx.Node) -> tuple[fx.Node, list[Any]]:
    """Rows, and the sizes that they have as the product."""
    up, across = value_of(weight).shape
    lead = [nodes.size(product.x, dim) for dim in range(value_of(product.x).dim() - 1)]
    rows = nodes.call(aten.reshape.default, product.x, [-1, across])
    turned = nodes.call(aten.permute.default, weight, [1, 0])
    if product.bias is None:
        return nodes.call(aten.mm.default, rows, turned), [*lead, up]
    return nodes.call(aten.addmm.default, product.bias, rows, turned), [*lead, up]
