"""The Triton kernels of ``mask_blocks``: one reads the mask, a program for each block; two write the lists."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glue_compiler.ops.document_blocks import BLOCK, hidden_below
from glue_compiler.ops.kernel_support import next_power_of_two

_CHUNK = 16
"""Blocks of keys whose parts of a query are read at once."""


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


@triton.jit
def _write_list(blocks, counts, indices, row, number, columns):
    """Of one row of blocks, those that are True, in order, then the others; and how many are True."""
    before = tl.cumsum(blocks, axis=0) - blocks
    count = tl.sum(blocks, axis=0)
    place = tl.where(blocks != 0, before, count + columns - before)
    tl.store(counts + row, count)
    tl.store(indices + row * number + place, columns, mask=columns < number)


@triton.jit
def _rows_kernel(
    seen, whole, row_parts, empty, offsets, part_counts, part_indices, whole_counts, whole_indices,
    queries, keys, of_queries, of_keys,
    ADDED: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, HAS_MEAN: tl.constexpr, IS_WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A block of queries: what their parts say together, then its lists. Leaves in ``seen`` what is seen in part."""
    block, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    query = block * BLOCK + tl.arange(0, BLOCK)
    is_query = query < queries
    dtype: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    rows = tl.full([BLOCK], float("-inf") if ADDED else 0.0, dtype)
    for start in range(0, of_keys, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = is_query[:, None] & (column < of_keys)[None, :]
        places = row_parts + (plane * queries + query)[:, None] * of_keys + column[None, :]
        parts = tl.load(places, mask=inside, other=0).to(dtype)
        # Triton up to 3.7 at least fails on a reduction of what it has loaded as it is, whose result is used twice.
        rows = tl.maximum(rows, tl.max(tl.where(inside, parts, float("-inf") if ADDED else 0.0), axis=1))
    place = plane * of_queries * BLOCK + query
    if ADDED:
        hidden = is_query & (rows <= LEAST)
        tl.store(empty + place, is_query & (rows == float("-inf")))
        tl.store(offsets + place, tl.where(is_query & (tl.abs(rows) < float("inf")), rows, 0.0))
    else:
        hidden = is_query & (rows == 0)
        tl.store(empty + place, hidden)
    columns = tl.arange(0, COLUMNS)
    row = plane * of_queries + block
    is_column = columns < of_keys
    is_seen = tl.load(seen + row * of_keys + columns, mask=is_column, other=0) != 0
    is_whole = tl.load(whole + row * of_keys + columns, mask=is_column, other=0) != 0
    if HAS_MEAN:
        visits_all = tl.max(hidden.to(tl.int32), axis=0) != 0
        is_seen = (is_seen | visits_all) & is_column
        is_whole = is_whole & (visits_all == 0)
    if ADDED:
        is_whole = is_seen & (block < queries // BLOCK) & (columns < keys // BLOCK)
    is_part = is_seen & (is_whole == 0)
    tl.store(seen + row * of_keys + columns, is_part, mask=is_column)
    tl.store(whole + row * of_keys + columns, is_whole, mask=is_column)
    _write_list(is_part.to(tl.int32), part_counts, part_indices, row, of_keys, columns)
    _write_list(is_whole.to(tl.int32), whole_counts, whole_indices, row, of_keys, columns)


@triton.jit
def _columns_kernel(
    part, whole, part_counts, part_indices, whole_counts, whole_indices, of_queries, of_keys, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of keys: its lists."""
    block, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, ROWS)
    places = (plane * of_queries + rows) * of_keys + block
    is_part = tl.load(part + places, mask=rows < of_queries, other=0) != 0
    is_whole = tl.load(whole + places, mask=rows < of_queries, other=0) != 0
    row = plane * of_keys + block
    _write_list(is_part.to(tl.int32), part_counts, part_indices, row, of_queries, rows)
    _write_list(is_whole.to(tl.int32), whole_counts, whole_indices, row, of_queries, rows)


def lists(mask: Tensor, kind: str, has_mean: bool) -> list[Tensor]:
    """What ``mask_blocks`` returns for ``mask [b, h, Q, K]`` on a GPU, which has elements and is read once.

    ``has_mean``: all keys count for a query that sees none.
    """
    batch, heads, queries, keys = mask.shape
    of_queries, of_keys = triton.cdiv(queries, BLOCK), triton.cdiv(keys, BLOCK)
    is_added, least = kind == "added", hidden_below(mask.dtype) if kind == "added" else 0.0
    seen, whole = mask.new_empty(2, batch, heads, of_queries, of_keys, dtype=torch.bool)
    row_parts = mask.new_empty(batch, heads, queries, of_keys)
    found = []
    for rows, columns in ((of_queries, of_keys), (of_keys, of_queries)):
        for _ in range(2):
            found.append(mask.new_empty(batch, heads, rows, dtype=torch.int32))
            found.append(mask.new_empty(batch, heads, rows, columns, dtype=torch.int32))
    empty = mask.new_empty(batch, heads, of_queries * BLOCK, dtype=torch.bool)
    of_rows = [empty, mask.new_empty(empty.shape)] if is_added else [empty]
    planes = batch * heads
    data = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    seen, whole, empty = (each.view(torch.uint8) for each in (seen, whole, empty))
    row_parts = row_parts if is_added else row_parts.view(torch.uint8)
    settings = {"ADDED": is_added, "LEAST": least, "BLOCK": BLOCK}
    _read_kernel[(of_keys, of_queries, planes)](
        data, seen, whole, row_parts, heads, queries, keys, of_queries, of_keys, *mask.stride(),
        HIDES=kind == "hides", **settings, num_warps=8,
    )  # fmt: skip
    _rows_kernel[(of_queries, planes)](
        seen, whole, row_parts, empty, of_rows[-1] if is_added else empty, *found[:4],
        queries, keys, of_queries, of_keys, HAS_MEAN=has_mean, IS_WIDE=mask.dtype == torch.float64, **settings,
        COLUMNS=next_power_of_two(of_keys), CHUNK=_CHUNK,
    )  # fmt: skip
    _columns_kernel[(of_keys, planes)](seen, whole, *found[4:], of_queries, of_keys, ROWS=next_power_of_two(of_queries))
    return [*found, *of_rows]
