"""Triton kernels of ``expert_gather``, ``expert_combine`` and ``expert_dot``. One reader per output: no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glue_compiler.ops.kernel_support import next_power_of_two

_WIDEST_BLOCK = 2048  # elements of one row that one program holds at a time


@triton.jit
def _gather_kernel(
    tokens, inverse, offsets, weights, out, num_experts, width, token_stride,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, WORK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: read once, written to each of its rows. ``inverse`` is a permutation, so every row is written."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    end = tl.load(offsets + num_experts - 1)
    values = tl.load(tokens + token.to(tl.int64) * token_stride + columns, mask=inside, other=0.0)
    zeros = tl.zeros((BLOCK,), dtype=values.dtype)
    for position in tl.range(0, TOP_K, loop_unroll_factor=4):
        slot = token * TOP_K + position
        row = tl.load(inverse + slot)
        result = values
        if WEIGHTED:
            result = (values.to(WORK) * tl.load(weights + slot).to(WORK)).to(values.dtype)
        result = tl.where(row < end, result, zeros)
        tl.store(out + row.to(tl.int64) * width + columns, result, mask=inside)


@triton.jit
def _combine_kernel(
    rows, inverse, offsets, weights, out, num_experts, width, row_stride,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, WORK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    end = tl.load(offsets + num_experts - 1)
    total = tl.zeros((BLOCK,), dtype=WORK)
    for position in tl.range(0, TOP_K, loop_unroll_factor=4):
        slot = token * TOP_K + position
        row = tl.load(inverse + slot)
        owned = row < end
        values = tl.load(rows + row.to(tl.int64) * row_stride + columns, mask=inside & owned, other=0.0).to(WORK)
        if WEIGHTED:
            values *= tl.load(weights + slot, mask=owned, other=0.0).to(WORK)
        total += values
    tl.store(out + token.to(tl.int64) * width + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dot_kernel(
    rows, tokens, inverse, offsets, out, num_experts, width, row_stride, token_stride,
    TOP_K: tl.constexpr, ONE_BLOCK: tl.constexpr, WORK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    end = tl.load(offsets + num_experts - 1)
    right = tokens + token.to(tl.int64) * token_stride
    columns = tl.arange(0, BLOCK)
    first = tl.load(right + columns, mask=columns < width, other=0.0).to(WORK)
    for position in tl.range(0, TOP_K, loop_unroll_factor=4):
        slot = token * TOP_K + position
        row = tl.load(inverse + slot)
        owned = row < end
        left = rows + row.to(tl.int64) * row_stride
        total = tl.load(left + columns, mask=(columns < width) & owned, other=0.0).to(WORK) * first
        if not ONE_BLOCK:
            for start in range(BLOCK, width, BLOCK):
                more = start + columns
                product = tl.load(left + more, mask=(more < width) & owned, other=0.0).to(WORK)
                total += product * tl.load(right + more, mask=more < width, other=0.0).to(WORK)
        # A token may hold inf or NaN where the slot belongs to no expert.
        result = tl.where(owned, tl.sum(total), 0.0)
        tl.store(out + slot, result.to(out.dtype.element_ty))


def _work(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _blocks(width: int) -> tuple[int, int, int]:
    """Block width, blocks per row and warps: 8 elements or more for each thread where the row is long enough."""
    block = min(_WIDEST_BLOCK, next_power_of_two(width))
    return block, triton.cdiv(width, block), max(1, min(8, block // 256))


def gather(tokens: Tensor, inverse: Tensor, offsets: Tensor, top_k: int, weights: Tensor | None) -> Tensor:
    """``expert_gather``; ``tokens`` has a contiguous last dimension, ``weights`` is a contiguous vector or None."""
    inverse, offsets = inverse.contiguous(), offsets.contiguous()
    slots, width = inverse.shape[0], tokens.shape[1]
    out = torch.empty((slots, width), dtype=tokens.dtype, device=tokens.device)
    block, blocks, warps = _blocks(width)
    if out.numel():
        _gather_kernel[(slots // top_k, blocks)](
            tokens, inverse, offsets, weights, out, offsets.shape[0], width, tokens.stride(0),
            TOP_K=top_k, WEIGHTED=weights is not None, WORK=_work(tokens.dtype), BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out


def combine(
    rows: Tensor, inverse: Tensor, offsets: Tensor, top_k: int, weights: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``expert_combine``; ``rows`` has a contiguous last dimension, ``weights`` is a contiguous vector or None."""
    inverse, offsets = inverse.contiguous(), offsets.contiguous()
    tokens, width = rows.shape[0] // top_k, rows.shape[1]
    out = torch.empty((tokens, width), dtype=out_dtype, device=rows.device)
    block, blocks, warps = _blocks(width)
    if out.numel():
        _combine_kernel[(tokens, blocks)](
            rows, inverse, offsets, weights, out, offsets.shape[0], width, rows.stride(0),
            TOP_K=top_k, WEIGHTED=weights is not None, WORK=_work(rows.dtype), BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out


def dot(rows: Tensor, tokens: Tensor, inverse: Tensor, offsets: Tensor, top_k: int, out_dtype: torch.dtype) -> Tensor:
    """``expert_dot``; ``rows`` and ``tokens`` have contiguous last dimensions."""
    inverse, offsets = inverse.contiguous(), offsets.contiguous()
    slots, width = rows.shape
    out = torch.empty((slots // top_k, top_k), dtype=out_dtype, device=rows.device)
    block, _, warps = _blocks(width)
    if out.numel():
        _dot_kernel[(slots // top_k,)](
            rows, tokens, inverse, offsets, out, offsets.shape[0], width, rows.stride(0), tokens.stride(0),
            TOP_K=top_k, ONE_BLOCK=width <= block, WORK=_work(rows.dtype), BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out
