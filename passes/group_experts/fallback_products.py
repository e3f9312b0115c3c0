"""Replaces transformers' operator for grouped products that torch has no kernel for: it reads offsets on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from glue_compiler.compat.switches import ENTER_AUTOCAST, EXIT_AUTOCAST
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.values import value_of
from glue_compiler.passes.group_experts.grouped_body import Emitter

_FALLBACK = "transformers::grouped_mm_fallback"
"""``(x [rows, K], weight [E, K, N], offsets [E] int) -> [rows, N]``, rows past the last offset zero; it is one
``tolist()`` and a loop of products, forward and backward (transformers 5)."""


def fallback_products(gm: fx.GraphModule) -> list[fx.Node]:
    """The calls of that operator. It is an operator of a library, so it is known by its registered name."""
    return [node for node in gm.graph.nodes if _operator_name(node.target) == _FALLBACK and _is_plain(node)]


def replace_fallback(gm: fx.GraphModule, node: fx.Node, analysis: EffectAnalysis) -> None:
    """Write ``glue::grouped_linear`` in place of ``node``."""
    write_grouped_linear(gm, node, _operands(node), analysis)


def write_grouped_linear(
    gm: fx.GraphModule, node: fx.Node, operands: tuple[fx.Node, fx.Node, fx.Node], analysis: EffectAnalysis
) -> None:
    """In place of ``node``, the product of ``operands``: x ``[rows, K]``, weight ``[E, K, N]``, offsets ``[E]``."""
    x, weight, offsets = operands
    device = value_of(x).device.type
    with gm.graph.inserting_before(node):
        # Autocast casts nothing for what is replaced; for grouped_linear, which stands for F.linear, it does.
        region = gm.graph.call_function(ENTER_AUTOCAST, (device, None, False, None))
        emit = Emitter(gm, (node,), analysis, autocast=(region,))
        narrow = emit.method("to", offsets, torch.int32)
        product = emit.call(torch.ops.glue.grouped_linear.default, x, weight, narrow, None, True)
        gm.graph.call_function(EXIT_AUTOCAST, (region,))
    node.replace_all_uses_with(product)
    gm.graph.erase_node(node)
    gm.recompile()


def _operator_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    names = ("input", "weight", "offs")
    given = [*node.args, *(node.kwargs[name] for name in names[len(node.args) :] if name in node.kwargs)]
    x, weight, offsets = given
    return x, weight, offsets  # type: ignore[return-value]


def _is_plain(node: fx.Node) -> bool:
    """Do the operands have the ranks and dtypes that the operator's implementation takes?"""
    values = [value_of(operand) for operand in _operands(node)]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    x, weight, offsets = values
    ranks = (x.dim(), weight.dim(), offsets.dim()) == (2, 3, 1)
    return ranks and x.dtype == weight.dtype and x.is_floating_point() and not offsets.is_floating_point()
