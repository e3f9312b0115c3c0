"""The Triton kernel of ``mask_blocks``: one program for each block of the mask, which is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glue_compiler.ops.document_blocks import BLOCK
from glue_compiler.ops.mask_blocks import hidden_below


@triton.jit
def _read_kernel(
    mask, seen, whole, row_parts, heads, queries, keys, of_queries, of_keys,
    stride_batch, stride_head, stride_query, stride_key,
    HIDES: tl.constexpr, ADDED: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``row_parts`` is ``[b, h, Q, K blocks]``: whether a key of the block is seen, or its largest number."""
    column, row, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    base = mask + (plane // heads) * stride_batch + (plane % heads) * stride_head
    query = row * BLOCK + tl.arange(0, BLOCK)
    key = column * BLOCK + tl.arange(0, BLOCK)
    places = base + query.to(tl.int64)[:, None] * stride_query + key.to(tl.int64)[None, :] * stride_key
    inside = (query < queries)[:, None] & (key < keys)[None, :]
    place = (plane * queries + query) * of_keys + column
    if ADDED:
        number = tl.load(places, mask=inside, other=float("-inf"))
        visible = ((number <= LEAST) == 0) & inside
        tl.store(row_parts + place, tl.max(number, axis=1), mask=query < queries)
        rows = tl.sum(visible.to(tl.int32), axis=1)
    else:
        element = tl.load(places, mask=inside, other=0).to(tl.int8)
        visible = ((element == 0) if HIDES else (element != 0)) & inside
        rows = tl.sum(visible.to(tl.int32), axis=1)
        tl.store(row_parts + place, rows > 0, mask=query < queries)
    number_seen = tl.sum(rows, axis=0)
    block = (plane * of_queries + row) * of_keys + column
    tl.store(seen + block, number_seen > 0)
    tl.store(whole + block, number_seen == BLOCK * BLOCK)


def read(mask: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over ``mask [b, h, Q, K]`` on a GPU; returns what ``mask_blocks._read`` does."""
    batch, heads, queries, keys = mask.shape
    of_queries, of_keys = triton.cdiv(queries, BLOCK), triton.cdiv(keys, BLOCK)
    seen = torch.empty(batch, heads, of_queries, of_keys, dtype=torch.bool, device=mask.device)
    whole = torch.empty_like(seen)
    row_parts = mask.new_empty(batch, heads, queries, of_keys)
    if mask.numel():
        data = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        least = hidden_below(mask.dtype) if kind == "added" else 0.0
        settings = {"HIDES": kind == "hides", "ADDED": kind == "added", "LEAST": least, "BLOCK": BLOCK}
        _read_kernel[(of_keys, of_queries, batch * heads)](
            data, seen, whole, row_parts, heads, queries, keys, of_queries, of_keys, *mask.stride(),
            **settings, num_warps=8,
        )  # fmt: skip
    return seen, whole, row_parts.amax(-1) if kind == "added" else row_parts.any(-1)
