"""Block lists of a packed batch for flex_attention, from document offsets alone.

A token sees one range of tokens, ``[first, last]``, and both ends never decrease from a token to the next one. So for
a block of tokens the blocks it sees in part are a range, those it sees in full are a range within it, and neither
needs the mask itself: ``create_block_mask`` evaluates all T x T of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 128
"""Tokens in a block: flex_attention's default, which all of its kernel configurations divide."""


def visible_range(
    cu_seqlens: Tensor, batch: int, length: int, is_causal: bool, window: int, *, of_keys: bool = False
) -> tuple[Tensor, Tensor]:
    """First and last key that each query sees, or the queries that see each key: int32 ``[batch, length]`` each."""
    token = torch.arange(batch * length, device=cu_seqlens.device, dtype=torch.int32)
    following = torch.searchsorted(cu_seqlens, token, right=True)  # skips empty documents
    row_start = token - token % length
    first = cu_seqlens[following - 1] - row_start
    last = cu_seqlens[following] - row_start - 1
    position = token - row_start
    if is_causal:
        first, last = (position, last) if of_keys else (first, position)
    if window > 0:
        first = torch.maximum(first, position - (window - 1))
        last = torch.minimum(last, position + (window - 1))
    return first.view(batch, length), last.view(batch, length)


def visibility(is_causal: bool) -> Callable[..., Tensor]:
    """The mask, in flex_attention's form: of a place, the ``first`` and, unless causal, the ``last`` of
    :func:`visible_range`, and, if there are keys that nobody sees, those that are ``seen``."""

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor, first: Tensor, *more: Tensor) -> Tensor:
        # Of a causal mask the last key that a query sees is its own position, which is not read from memory.
        last, seen = (query, more) if is_causal else (more[0][batch, query], more[1:])
        visible = (key >= first[batch, query]) & (key <= last)
        return visible & seen[0][batch, key] if seen else visible

    return is_visible


def block_lists(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks that each block sees in part, then those it sees in full.

    Args:
        first, last: int32 ``[B, T]`` of :func:`visible_range`.

    Returns:
        Counts int32 ``[B, 1, blocks]`` and indices int32 ``[B, 1, blocks, blocks]`` of either list; entries past the
        count are not read.
    """
    begin, end, full_begin, full_end = _block_ranges(first, last)
    blocks = begin.shape[1]
    place = torch.arange(blocks, device=first.device, dtype=torch.int32)
    before = full_begin - begin
    in_part = place + torch.where(place < before[..., None], begin[..., None], (full_end - before)[..., None])
    in_full = place + full_begin[..., None]
    counts = before + end - full_end, full_end - full_begin
    (part_count, full_count), (part, full) = (
        tuple(each.to(torch.int32)[:, None] for each in group)
        for group in (counts, (in_part.clamp(max=blocks - 1), in_full.clamp(max=blocks - 1)))
    )
    return part_count, part, full_count, full


def block_lists_of_seen(first: Tensor, last: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
    """:func:`block_lists` of the queries, then of the keys, where nobody sees the keys with ``seen[b, k]`` False.

    Args:
        first, last: int32 ``[B, T]`` of :func:`visible_range`. seen: bool ``[B, T]``, in any order.
    """
    begin, end, full_begin, full_end = (each[..., None] for each in _block_ranges(first, last))
    blocks, length = begin.shape[1], seen.shape[1]
    column = torch.arange(blocks, device=first.device)
    padded = torch.nn.functional.pad(seen.to(torch.int32), (0, blocks * BLOCK - length))
    number = padded.view(-1, blocks, BLOCK).sum(-1)[:, None]
    in_full = (full_begin <= column) & (column < full_end) & (number == BLOCK)
    in_part = (begin <= column) & (column < end) & (number > 0) & ~in_full
    both = in_part, in_full, in_part.transpose(1, 2), in_full.transpose(1, 2)
    return tuple(part[:, None] for each in both for part in listed(each))


def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many entries of each row are True, and which: bool ``[..., n]`` → int32 ``[...]`` and ``[..., n]``.

    What follows the last of a row is not to be read.
    """
    indices = torch.argsort((~blocks).to(torch.int32), dim=-1, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.to(torch.int32)


def _block_ranges(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First and behind last of the blocks that each block sees, then of those it sees in full: ``[B, blocks]`` each."""
    length = first.shape[1]
    blocks = (length + BLOCK - 1) // BLOCK
    opening = torch.arange(blocks, device=first.device) * BLOCK
    closing = (opening + BLOCK - 1).clamp(max=length - 1)
    begin = first[:, opening] // BLOCK
    end = last[:, closing] // BLOCK + 1
    full_begin = (first[:, closing] + BLOCK - 1) // BLOCK
    full_end = (last[:, opening] + 1) // BLOCK
    # The kernels check the bounds of tokens in masked blocks alone, so a short block sees none in full.
    has_full = (full_begin < full_end) & (opening + BLOCK <= length)
    return begin, end, torch.where(has_full, full_begin, end), torch.where(has_full, full_end, end)


def hidden_below(dtype: torch.dtype) -> float:
    """A number of ``dtype`` that is added to a score and is this or less leaves a weight of zero."""
    return max(torch.finfo(dtype).min, -1e9)
