"""The Triton kernel of ``dequantize_nf4``."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_BYTES = 1024
"""That a program reads: of 512 to 4,096 the fastest on one H200, for weights of 1024 x 4096 to 12288 x 4096."""


@triton.jit
def dequantize(
    packed, scales, table, out, scale_codes, scale_table, scale_offset,
    bytes, NESTED: tl.constexpr, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """A program reads ``BYTES`` bytes, and writes two numbers for each; a block of ``BLOCK`` numbers shares a scale."""
    first = tl.program_id(0).to(tl.int64) * BYTES
    place = first + tl.arange(0, BYTES)
    inside = place < bytes
    byte = tl.load(packed + place, mask=inside, other=0).to(tl.int32)
    block = place * 2 // BLOCK
    if NESTED:
        scale = tl.load(scale_table + tl.load(scale_codes + block, mask=inside, other=0).to(tl.int32))
        scale = scale * tl.load(scales + block // SCALE_BLOCK, mask=inside, other=0.0) + tl.load(scale_offset)
    else:
        scale = tl.load(scales + block, mask=inside, other=0.0)
    upper, lower = tl.load(table + (byte >> 4)) * scale, tl.load(table + (byte & 15)) * scale
    both = tl.reshape(tl.join(upper, lower), (2 * BYTES,)).to(out.dtype.element_ty)
    number = first * 2 + tl.arange(0, 2 * BYTES)
    tl.store(out + number, both, mask=number < bytes * 2)


def programs(numbers: int) -> int:
    return -(-numbers // (2 * _BYTES))


def arguments(
    numbers: int,
    packed: Any,
    scales: Any,
    table: Any,
    out: Any,
    block: int,
    scale_block: int,
    scale_codes: Any = None,
    scale_table: Any = None,
    scale_offset: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's tensors, or what stands for these in a graph, and its constants, for ``numbers`` of them."""
    tensors = {"packed": packed, "scales": scales, "table": table, "out": out}
    is_nested = scale_codes is not None
    nested = (scale_codes, scale_table, scale_offset) if is_nested else (scales,) * 3  # which are not read
    tensors |= dict(zip(("scale_codes", "scale_table", "scale_offset"), nested, strict=True))
    sizes = {"BLOCK": block, "SCALE_BLOCK": scale_block, "BYTES": _BYTES}
    return tensors, {"bytes": numbers // 2, "NESTED": is_nested, **sizes}


def launch(packed: Any, scales: Any, table: Any, out: Any, block: int, scale_block: int, *nested: Any) -> None:
    """Writes to ``out``."""
    tensors, constants = arguments(out.numel(), packed, scales, table, out, block, scale_block, *nested)
    dequantize[programs(out.numel()),](**tensors, **constants)
