"""Replaces torch's own grouped product where another package's kernel is the faster one."""

from __future__ import annotations

import torch
from torch import fx

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.operators import given_as
from glue_compiler.fx.values import expression, value_of
from glue_compiler.ops import quack_products

_Operands = tuple[fx.Node, fx.Node, fx.Node]


def torch_products(gm: fx.GraphModule, analysis: EffectAnalysis) -> list[tuple[fx.Node, _Operands]]:
    """The calls whose kernel is not the fastest: x ``[rows, K]``, weight ``[E, K, N]`` and offsets ``[E]`` of each.

    torch leaves rows past the last offset as they are in memory; ``grouped_linear`` gives zeros there.
    """
    found = []
    for node in gm.graph.nodes:
        # Cheaper to ask than what a call does, and few are left.
        if _rank(node) != 2 or not {1, 2, 3} <= {_rank(operand) for operand in node.all_input_nodes}:
            continue
        operands = _operands(gm, node, analysis)
        if operands is not None and quack_products.pays(*map(value_of, operands[:2])):
            found.append((node, operands))
    return found


def _operands(gm: fx.GraphModule, node: fx.Node, analysis: EffectAnalysis) -> _Operands | None:
    record = analysis.record_of(gm, node)
    if record is None or len(record.operators) != 1:
        return None
    (made,) = record.operators
    if made.overload is not torch.ops.aten._grouped_mm.default:
        return None
    if made.arguments["bias"] is not None or made.arguments["out_dtype"] is not None:
        return None
    x, weight, offsets = (given_as(node, made, name) for name in ("self", "mat2", "offs"))
    if x is None or weight is None or offsets is None or (_rank(x), _rank(weight), _rank(offsets)) != (2, 3, 1):
        return None
    # Of rows in columns torch gives the gradient in columns too, which a backward of somebody's own may count on.
    return (x, weight, offsets) if expression(value_of(x).stride(1)) == 1 else None


def _rank(node: fx.Node) -> int | None:
    value = value_of(node)
    return value.dim() if isinstance(value, torch.Tensor) else None
