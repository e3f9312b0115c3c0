"""Triton kernels of ``expert_sort``: histogram per block, (a scan by torch,) placement by rank within the block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glue_compiler.ops.kernel_support import next_power_of_two

_BLOCK = 256  # slots per program; the rank within a block compares all its pairs
_WARPS = 8


@triton.jit
def _read_keys(
    ids, lane, tokens, slots, top_k, stride_token, stride_position, num_experts,
    K_MAJOR: tl.constexpr,
):  # fmt: skip
    """Slot numbers and sort keys of the walk positions ``lane``; lanes past the end get the key ``num_experts + 1``."""
    if K_MAJOR:
        position = lane // tokens
        token = lane % tokens
    else:
        token = lane // top_k
        position = lane % top_k
    inside = lane < slots
    places = ids + token.to(tl.int64) * stride_token + position.to(tl.int64) * stride_position
    expert = tl.load(places, mask=inside, other=0)
    belongs = (expert >= 0) & (expert < num_experts)
    key = tl.where(belongs, expert, num_experts).to(tl.int32)
    key = tl.where(inside, key, num_experts + 1)
    return token * top_k + position, key


@triton.jit
def _count_kernel(
    ids, block_counts, tokens, slots, top_k, stride_token, stride_position, num_experts, num_blocks,
    K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane = block * BLOCK + tl.arange(0, BLOCK)
    _, key = _read_keys(ids, lane, tokens, slots, top_k, stride_token, stride_position, num_experts, K_MAJOR)
    histogram = tl.histogram(key, BINS)
    bins = tl.arange(0, BINS)
    tl.store(block_counts + bins * num_blocks + block, histogram, mask=bins <= num_experts)


@triton.jit
def _place_kernel(
    ids, block_counts, block_ends, order, inverse, counts, offsets,
    tokens, slots, top_k, stride_token, stride_position, num_experts, num_blocks,
    K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    lane = block * BLOCK + within
    slot, key = _read_keys(ids, lane, tokens, slots, top_k, stride_token, stride_position, num_experts, K_MAJOR)
    inside = lane < slots
    equal_before = (key[:, None] == key[None, :]) & (within[None, :] < within[:, None])
    rank = tl.sum(equal_before.to(tl.int32), axis=1)
    cell = key * num_blocks + block
    start = tl.load(block_ends + cell, mask=inside, other=0) - tl.load(block_counts + cell, mask=inside, other=0)
    row = start + rank
    tl.store(order + row, slot, mask=inside)
    tl.store(inverse + slot, row, mask=inside)
    if block == 0:
        expert = tl.arange(0, BINS)
        real = expert < num_experts
        end = tl.load(block_ends + (expert + 1) * num_blocks - 1, mask=real, other=0)
        begin = tl.load(block_ends + expert * num_blocks - 1, mask=real & (expert > 0), other=0)
        tl.store(offsets + expert, end, mask=real)
        tl.store(counts + expert, end - begin, mask=real)


def sort(expert_ids: Tensor, num_experts: int, k_major: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``expert_sort`` for ``expert_ids [tokens, top_k]`` with at least one slot, on the ids' own device."""
    tokens, top_k = expert_ids.shape
    slots = tokens * top_k
    num_blocks = triton.cdiv(slots, _BLOCK)
    bins = max(64, next_power_of_two(num_experts + 2))

    def make(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=expert_ids.device)

    block_counts = make(num_experts + 1, num_blocks)
    order, inverse, counts, offsets = make(slots), make(slots), make(num_experts), make(num_experts)
    sizes = (tokens, slots, top_k, *expert_ids.stride(), num_experts, num_blocks)
    blocks = {"K_MAJOR": k_major, "BLOCK": _BLOCK, "BINS": bins, "num_warps": _WARPS}
    _count_kernel[(num_blocks,)](expert_ids, block_counts, *sizes, **blocks)
    block_ends = torch.cumsum(block_counts.view(-1), 0, dtype=torch.int32)
    _place_kernel[(num_blocks,)](
        expert_ids, block_counts, block_ends, order, inverse, counts, offsets, *sizes, **blocks
    )
    return order, inverse, counts, offsets
