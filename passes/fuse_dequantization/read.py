"""Finds bitsandbytes' operators on weights of 4 bits in a graph of ATen operators."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from glue_compiler.compat.symbols import size_when_traced
from glue_compiler.fx.records import bound_arguments
from glue_compiler.fx.values import has_value, is_in_order, is_plain, value_of
from glue_compiler.ops.kernel_support import runs_triton
from glue_compiler.ops.nf4 import SCALE_BLOCK
from glue_compiler.pipeline.results import Skip

LEAST_ROWS = 1537
"""bitsandbytes has a kernel of its own for a product of fewer rows; for others it dequantises the weight first."""

_PRODUCT = "bitsandbytes::gemm_4bit"
_DEQUANTIZATION = "bitsandbytes::dequantize_4bit"
_OF_SCALES = "bitsandbytes::dequantize_blockwise"


@dataclass(frozen=True)
class Scales:
    """float32 [blocks]. With ``codes`` (uint8 [blocks]) they are those of ``SCALE_BLOCK`` of them: a scale is the
    number at its code in ``table`` (float32 [256]) times its own scale, plus ``offset``."""

    scales: fx.Node
    codes: fx.Node | None = None
    table: fx.Node | None = None
    offset: fx.Node | None = None


@dataclass(frozen=True)
class Product:
    """``x`` [..., K] times the transposed weight [N, K], plus ``bias`` [N]."""

    x: fx.Node
    bias: fx.Node | None


@dataclass(frozen=True)
class Call:
    """``node`` is the weight of ``shape`` in ``dtype``, or the product with it."""

    node: fx.Node
    packed: fx.Node
    scales: Scales
    block: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    product: Product | None = None


def is_candidate(node: fx.Node) -> bool:
    return _name_of(node) in (_PRODUCT, _DEQUANTIZATION)


def find_calls(graph: fx.Graph) -> tuple[list[Call], list[Skip]]:
    """In the order of the graph; and why others are left alone."""
    found, skips = [], []
    for node in filter(is_candidate, graph.nodes):
        call = _read(node)
        if isinstance(call, str):
            skips.append(Skip.at(node, call))
        else:
            found.append(call)
    return found, skips


def _read(node: fx.Node) -> Call | str:
    given = bound_arguments(node.target, node.args, node.kwargs)
    value = value_of(node)
    if not runs_triton(value):
        return "glue's kernel is Triton's, which is not installed, or has no code for this device"
    if given["quant_type"] != "nf4":
        return f"the weight is of type {given['quant_type']}, and glue's kernel is for nf4"
    if _name_of(node) == _PRODUCT:
        product, packed, shape = Product(given["A"], given["bias"]), given["B"], tuple(given["shapeB"])
        scales = Scales(given["absmax"], given["absmax_8bit"], given["absmax_code"], given["absmax_offset"])
        rows = math.prod(size_when_traced(size) or LEAST_ROWS for size in value.shape[:-1])
        if rows < LEAST_ROWS:
            return f"bitsandbytes has a kernel for products of fewer than {LEAST_ROWS} rows"
        call = Call(node, packed, scales, given["blocksize"], shape, value.dtype, product)
    else:
        packed, shape = given["A"], tuple(given["shape"])
        call = Call(node, packed, _scales(given["absmax"]), given["blocksize"], shape, given["dtype"])
    return _fault(call) or call


def _fault(call: Call) -> str | None:
    operands = (call.packed, call.scales.scales, *filter(None, (call.scales.codes, call.scales.table)))
    if not all(map(_is_in_order, operands)) or value_of(call.packed).dtype != torch.uint8:
        return "the weight is not in bytes, or not in order in memory"
    numbers = math.prod(call.shape)
    if not isinstance(numbers, int) or value_of(call.packed).numel() * 2 != numbers or numbers % call.block:
        return "the weight has an odd number of elements, or a last block that is not full"
    return None


def _is_in_order(node: fx.Node) -> bool:
    value = value_of(node) if has_value(node) else None
    return isinstance(value, torch.Tensor) and is_plain(value) and is_in_order(value)


def _scales(node: fx.Node) -> Scales:
    """Those of 8 bits are dequantised by the kernel, too."""
    if isinstance(node, fx.Node) and node.target is torch.ops.aten.add.Tensor and not node.kwargs:
        nested, offset = node.args
        if isinstance(nested, fx.Node) and isinstance(offset, fx.Node) and _name_of(nested) == _OF_SCALES:
            given = bound_arguments(nested.target, nested.args, nested.kwargs)
            values = value_of(offset), value_of(nested)
            is_read = values[0].numel() == 1 and all(value.dtype == torch.float32 for value in values)
            if is_read and given["blocksize"] == SCALE_BLOCK and values[1].dim() == 1:
                return Scales(given["absmax"], given["A"], given["code"], offset)
    return Scales(node)


def _name_of(node: fx.Node) -> str:
    target = node.target
    return target.name() if isinstance(target, torch._ops.OpOverload) else ""
