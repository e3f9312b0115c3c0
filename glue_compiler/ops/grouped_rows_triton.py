"""Triton kernels of ``grouped_sum`` and ``grouped_repeat``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glue_compiler.ops.kernel_support import next_power_of_two


@triton.jit
def _sum_kernel(
    rows, offsets, out, num_rows, width, row_stride,
    WORK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.program_id(1)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.minimum(tl.load(offsets + expert), num_rows)
    total = tl.zeros((BLOCK_ROWS, BLOCK), dtype=WORK)
    for first in range(start, end, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        inside = (row < end)[:, None] & (columns < width)[None, :]
        places = rows + row.to(tl.int64)[:, None] * row_stride + columns[None, :]
        total += tl.load(places, mask=inside, other=0.0).to(WORK)
    result = tl.sum(total, axis=0).to(out.dtype.element_ty)
    tl.store(out + expert.to(tl.int64) * width + columns, result, mask=columns < width)


@triton.jit
def _repeat_kernel(
    values, offsets, out, num_experts, num_rows, width, value_stride,
    EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + group, mask=group < num_experts, other=2147483647)
    expert = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    owned = (row < tl.load(offsets + num_experts - 1))[:, None]
    inside = (row < num_rows)[:, None] & (columns < width)[None, :]
    places = out + row.to(tl.int64)[:, None] * width + columns[None, :]
    source = values + expert.to(tl.int64)[:, None] * value_stride + columns[None, :]
    result = tl.load(source, mask=inside & owned, other=0.0)
    tl.store(places, result, mask=inside)


def sum_rows(rows: Tensor, offsets: Tensor) -> Tensor:
    """``grouped_sum``; ``rows`` has a contiguous last dimension."""
    experts, width = offsets.shape[0], rows.shape[1]
    out = torch.empty((experts, width), dtype=rows.dtype, device=rows.device)
    if out.numel():
        work = tl.float64 if rows.dtype == torch.float64 else tl.float32
        _sum_kernel[(triton.cdiv(width, 64), experts)](
            rows, offsets.contiguous(), out, rows.shape[0], width, rows.stride(0),
            WORK=work, BLOCK_ROWS=64, BLOCK=64, num_warps=4,
        )  # fmt: skip
    return out


def repeat(values: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """``grouped_repeat``; ``values`` has a contiguous last dimension."""
    experts, width = values.shape
    out = torch.empty((rows, width), dtype=values.dtype, device=values.device)
    block = min(512, next_power_of_two(width))
    if out.numel():
        _repeat_kernel[(triton.cdiv(rows, 16), triton.cdiv(width, block))](
            values, offsets.contiguous(), out, experts, rows, width, values.stride(0),
            EXPERTS=next_power_of_two(experts), BLOCK_ROWS=16, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
