"""``mask_blocks``: which blocks of the score matrix a mask leaves, read from the mask itself."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from glue_compiler.compat.symbols import size_when_traced
from glue_compiler.ops.device_memory import size_of
from glue_compiler.ops.document_blocks import BLOCK, hidden_below, listed
from glue_compiler.ops.kernel_support import runs_triton
from glue_compiler.ops.opaque import opaque

Kind = Literal["shows", "hides", "added"]
"""What an element says of its query and key. ``shows``: True, the key may be seen. ``hides``: True, it is hidden.
``added``: a number that is added to the score."""

EmptyRows = Literal["zeros", "mean", "nan"]
"""What a query gets that sees no key at all. ``zeros``: what ``scaled_dot_product_attention`` gives. ``mean``: the mean
of all values, as from a softmax of scores that are all one finite number. ``nan``: as from one of minus infinities."""

_HIDING_AND_SHOWING: dict[str, tuple[bool | float, bool | float]] = {
    "shows": (False, True),
    "hides": (True, False),
    "added": (float("-inf"), 0.0),
}
_LEAST = 512
"""Queries, from which on copies of operands of an attention are small beside what they save."""
_MOST = 2**30
"""Numbers of a second mask, at most, and of a card's memory the part of its bytes that each may take: 1 GiB of 80."""
_SHARE = 80


@opaque("mask_blocks")
def mask_blocks(mask: Tensor, queries: int, keys: int, kind: str, empty_rows: str) -> list[Tensor]:
    """Which blocks of 128 queries and 128 keys an attention under ``mask`` has to visit. No host synchronisation.

    Args:
        mask: bool, or floating for ``kind="added"``; at most four dimensions, any strides, broadcastable to
            ``[B, H, queries, keys]``.
        queries, keys: Q and K.
        kind: of :data:`Kind`.
        empty_rows: of :data:`EmptyRows`.

    Returns:
        Counts ``[b, h, blocks]`` and indices ``[b, h, blocks, blocks]`` of four lists, int32, where b and h are the
        mask's own batch and heads, or 1: for each block of queries the blocks of keys that are seen in part, and those
        seen in full; for each block of keys the same blocks of queries. Then bool ``[b, h, blocks * 128]``: the queries
        that see no key, False behind Q; for ``added`` those whose numbers are all minus infinity. For ``added`` there
        follows ``[b, h, blocks * 128]`` in the mask's dtype: the largest number of each query, 0 where that is infinite
        and behind Q.

        A number that is added stays to be added in all blocks; those are "in full" that reach over no end of the
        matrix. Blocks of hidden keys are left out unless one of their queries sees no other key and gets a mean,
        to which all keys belong then.

        About ``16 * (Q / 128) * (K / 128)`` bytes for each of the mask's batches and heads: 0.1% of a boolean mask.

    Raises:
        ValueError: a kind, rank or dtype that is none of those.
    """
    _check(mask, kind, empty_rows)
    mask = as_four(mask)
    mask = mask.expand(*mask.shape[:2], queries, keys)
    has_mean = empty_rows == "mean" or kind == "added"
    if runs_triton(mask) and mask.numel():
        from glue_compiler.ops import mask_blocks_triton

        return mask_blocks_triton.lists(mask, kind, has_mean)
    seen, whole, rows = _read(mask, kind)
    if kind == "added":
        empty, hidden = rows == float("-inf"), rows <= hidden_below(mask.dtype)
        of_rows = [empty, torch.where(rows.isfinite(), rows, 0)]
    else:
        hidden = ~rows
        of_rows = [hidden]
    if has_mean:
        # A row of nothing but numbers that hide is a softmax of those numbers: all of its keys count.
        visits_all = torch.nn.functional.pad(hidden, (0, -queries % BLOCK)).unflatten(-1, (-1, BLOCK)).any(-1)
        seen, whole = seen | visits_all[..., None], whole & ~visits_all[..., None]
    if kind == "added":
        complete = [torch.arange((n + BLOCK - 1) // BLOCK, device=mask.device) < n // BLOCK for n in (queries, keys)]
        whole = seen & complete[0][:, None] & complete[1]
    part = seen & ~whole
    blocks = (part, whole, part.transpose(-1, -2), whole.transpose(-1, -2))
    of_rows = [torch.nn.functional.pad(each, (0, -queries % BLOCK)) for each in of_rows]
    return [*(each.contiguous() for each_list in blocks for each in listed(each_list)), *of_rows]


@mask_blocks.register_fake
def _(mask: Tensor, queries: int, keys: int, kind: str, empty_rows: str) -> list[Tensor]:
    _check(mask, kind, empty_rows)
    batch, heads = as_four(mask).shape[:2]
    of_queries, of_keys = ((n + BLOCK - 1) // BLOCK for n in (queries, keys))
    found = []
    for rows, columns in ((of_queries, of_keys), (of_keys, of_queries)):
        for _ in range(2):
            found += [
                mask.new_empty(batch, heads, rows, dtype=torch.int32),
                mask.new_empty(batch, heads, rows, columns, dtype=torch.int32),
            ]
    found.append(mask.new_empty(batch, heads, of_queries * BLOCK, dtype=torch.bool))
    return [*found, mask.new_empty(batch, heads, of_queries * BLOCK)] if kind == "added" else found


def whole_blocks_pay(queries: int | torch.SymInt, keys: int | torch.SymInt, device: torch.device) -> bool:
    """Are kernels faster with ``mask_in_whole_blocks``?

    Where they do not know that a length is a multiple of their blocks, they take each index modulo it, after which
    Triton reads the elements of a mask one by one: ten times the time, of all masks that add numbers.
    """
    known = [size_when_traced(size) for size in (queries, keys)]
    memory = size_of(device)
    most = _MOST if memory is None else min(_MOST, memory // _SHARE)
    is_long = all(size is not None and _LEAST <= size <= math.isqrt(most) for size in known)
    is_whole = all(isinstance(size, int) and size % BLOCK == 0 for size in (queries, keys))
    return device.type == "cuda" and known[0] == known[1] and is_long and not is_whole


def to_whole_blocks(size: int) -> int:
    """The multiple of 128 that follows ``size``.

    It is never ``size`` itself: a graph for any size would be one for multiples of 128, or for all others.
    """
    return (size // BLOCK + 1) * BLOCK


@opaque("mask_in_whole_blocks")
def mask_in_whole_blocks(mask: Tensor, queries: int, keys: int, kind: str) -> Tensor:
    """A copy of ``mask`` for ``to_whole_blocks`` of Q and K: keys behind K are hidden, queries behind Q see the first.

    Args: as of ``mask_blocks``.

    Returns:
        Contiguous ``[b, h, q, k]`` in the mask's dtype; b, h and q are 1 where the mask has one element for all.
    """
    _check(mask, kind, "zeros")
    mask = as_four(mask)
    hidden, shown = _HIDING_AND_SHOWING[kind]
    copy = mask.new_full(_in_whole_blocks(mask, queries, keys), hidden)
    rows = mask.shape[2]
    copy[:, :, :rows, :keys] = mask
    copy[:, :, rows:, :1] = shown
    return copy


@mask_in_whole_blocks.register_fake
def _(mask: Tensor, queries: int, keys: int, kind: str) -> Tensor:
    _check(mask, kind, "zeros")
    return mask.new_empty(_in_whole_blocks(as_four(mask), queries, keys))


def _in_whole_blocks(four: Tensor, queries: int, keys: int) -> tuple[int, ...]:
    of_queries, of_keys = to_whole_blocks(queries), to_whole_blocks(keys)
    is_of_all = isinstance(four.shape[2], int) and four.shape[2] == 1
    return (*four.shape[:2], 1 if is_of_all else of_queries, of_keys)


def _read(mask: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over ``mask [b, h, Q, K]``.

    Returns:
        bool ``[b, h, Q blocks, K blocks]``: some key is seen by some query; every key by every query, in blocks that
        reach over no end. ``[b, h, Q]``: whether a query sees a key; for ``added`` its largest number.
    """
    if kind == "added":
        visible, rows = ~(mask <= hidden_below(mask.dtype)), mask.amax(-1)
    else:
        visible = mask if kind == "shows" else ~mask
        rows = visible.any(-1)
    over = [0, -mask.shape[3] % BLOCK, 0, -mask.shape[2] % BLOCK]
    blocks = torch.nn.functional.pad(visible, over).unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    return blocks.any(-1).any(3), blocks.all(-1).all(3), rows


@opaque("row_offsets")
def row_offsets(mask: Tensor, bias: Tensor, kind: str) -> Tensor:
    """The largest number that ``bias`` adds to a score that a boolean mask leaves, for each query.

    Args:
        mask: bool, as of ``mask_blocks``, of ``kind`` ``shows`` or ``hides``.
        bias: floating; both are broadcast to the same ``[b, h, Q, K]``.

    Returns:
        ``[b, h, Q]`` in the bias's dtype, 0 where it is infinite or there is none; sizes of 1 are kept.

    Raises:
        ValueError: a kind, rank or dtype that is none of those.
    """
    _check(mask, kind, "zeros")
    mask, bias = as_four(mask), as_four(bias)
    found = bias.new_empty(torch.broadcast_shapes(mask.shape, bias.shape)[:3])
    for head in range(found.shape[1]):  # one by one, so that scores of all heads are never in memory
        shown, added = (each[:, head if each.shape[1] > 1 else 0] for each in (mask, bias))
        shown = shown if kind == "shows" else ~shown
        found[:, head] = torch.where(shown, added, float("-inf")).amax(-1)
    return found.where(found.isfinite(), 0)


@row_offsets.register_fake
def _(mask: Tensor, bias: Tensor, kind: str) -> Tensor:
    return bias.new_empty(torch.broadcast_shapes(as_four(mask).shape, as_four(bias).shape)[:3])


def as_four(mask: Tensor) -> Tensor:
    """With four dimensions, and size 1 where all elements of a dimension are one in memory."""
    mask = mask[(None,) * (4 - mask.dim())]
    for dim, stride in enumerate(mask.stride()):
        if isinstance(stride, int) and stride == 0 and mask.shape[dim] != 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _check(mask: Tensor, kind: str, empty_rows: str) -> None:
    for name, given, known in (("kind", kind, get_args(Kind)), ("empty_rows", empty_rows, get_args(EmptyRows))):
        if given not in known:
            raise ValueError(f"mask_blocks: {name} must be one of {', '.join(known)}, got {given!r}")
    fits = mask.is_floating_point() if kind == "added" else mask.dtype == torch.bool
    if not fits or mask.dim() > 4:
        raise ValueError(f"mask_blocks: a mask that {kind} cannot be {mask.dtype} with {mask.dim()} dimensions")
