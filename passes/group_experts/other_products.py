"""Replaces grouped products of torch and of transformers by glue's own, where those are the faster ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from glue_compiler.compat.switches import ENTER_AUTOCAST, EXIT_AUTOCAST
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.modes import Mode
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.operators import given_as
from glue_compiler.fx.values import expression, requires_grad, value_of, values_of
from glue_compiler.ops import quack_products

_OPERANDS = {
    # Reads its offsets on the host, and multiplies in a loop (transformers 5). Rows past the last offset are zero.
    "transformers::grouped_mm_fallback": ("input", "weight", "offs"),
    # Leaves rows past the last offset as they are in memory; glue's gives zeros there.
    "aten::_grouped_mm": ("self", "mat2", "offs"),
}
"""By the registered name of an operator: x ``[rows, K]``, weight ``[E, K, N]`` and offsets ``[E]``."""

Operands = tuple[fx.Node, fx.Node, fx.Node]


def other_products(
    gm: fx.GraphModule, analysis: EffectAnalysis, kernels: str
) -> Iterator[tuple[fx.Node, Operands, str]]:
    """The calls to replace, their operands, and what they are counted as. ``kernels``: the option of that name."""
    for node in list(gm.graph.nodes):
        # Cheaper to ask than what a call does, and few are left.
        if _rank(node) != 2 or not {1, 2, 3} <= {_rank(operand) for operand in node.all_input_nodes}:
            continue
        record = analysis.record_of(gm, node)
        made = record.operators[0] if record is not None and len(record.operators) == 1 else None
        names = _OPERANDS.get(made.overload._schema.name) if made is not None else None
        if made is None or names is None:
            continue
        x, weight, offsets = (given_as(node, made, name) for name in names)
        if x is None or weight is None or offsets is None or (_rank(x), _rank(weight), _rank(offsets)) != (2, 3, 1):
            continue
        values = values_of((x, weight))
        if made.overload.namespace != "aten":
            if values[0].dtype == values[1].dtype and not value_of(offsets).is_floating_point():
                yield node, (x, weight, offsets), "fallbacks_replaced"
        elif (
            kernels == "all"
            and (made.arguments["bias"], made.arguments["out_dtype"]) == (None, None)
            # Of rows in columns torch gives the gradient in columns too, which a backward of somebody's may count on.
            and expression(values[0].stride(1)) == 1
            and quack_products.pays(*values)
        ):
            yield node, (x, weight, offsets), "products_replaced"


def write_grouped_linear(gm: fx.GraphModule, node: fx.Node, operands: Operands, analysis: EffectAnalysis) -> None:
    """``glue::grouped_linear`` of ``operands`` in place of ``node``."""
    x, weight, offsets = operands
    off = (value_of(x).device.type, None, False, None)
    make = NodeMaker(analysis.fake_mode)
    with make.before(node, Mode(requires_grad(value_of(node)), (off,)), node):
        # Autocast casts nothing for what is replaced; for grouped_linear, which stands for F.linear, it does.
        region = gm.graph.call_function(ENTER_AUTOCAST, off)
        narrow = make.method("to", offsets, torch.int32)
        product = make.call(torch.ops.glue.grouped_linear.default, x, weight, narrow, None, True)
        gm.graph.call_function(EXIT_AUTOCAST, (region,))
    node.replace_all_uses_with(product)
    gm.graph.erase_node(node)
    gm.recompile()


def _rank(node: fx.Node) -> int | None:
    value = value_of(node)
    return value.dim() if isinstance(value, torch.Tensor) else None
