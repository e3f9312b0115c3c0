"""Blocks and stages of flex_attention's kernels that fit the shared memory of a card.

Inductor chooses them for a generation, and for kernels that read no mask. Where they do not fit a card of it, the model
ends in ``OutOfResources`` when it runs: with heads of 256 on an RTX 4090, say. What kernels take is estimated here;
``tests/tools/test_cards.py`` compiles them for each card and compares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from glue_compiler.compat.attention import FlexBackward, FlexForward, FlexKernels, flex_kernels
from glue_compiler.ops import cards
from glue_compiler.ops.cards import Card
from glue_compiler.ops.kernel_support import next_power_of_two

Tiles = TypeVar("Tiles", FlexForward, FlexBackward)

_BESIDE_FORWARD, _BESIDE_BACKWARD = 1024, 2304
"""Bytes, and in backward numbers of the operands' dtype, beside the operands: at most, of what was compiled."""

# By falling size. Rows of a forward are queries, of which each program has its own; columns are keys, which it walks.
_FORWARD = (
    FlexForward(128, 64, 3, 8),
    FlexForward(128, 64, 2, 8),
    FlexForward(64, 64, 3, 4),
    FlexForward(64, 64, 2, 4),
    FlexForward(64, 32, 2, 4),
    FlexForward(32, 32, 2, 4),
    FlexForward(32, 16, 2, 4),
)
_BACKWARD = (
    FlexBackward(64, 64, 64, 64, 2, 4),
    FlexBackward(32, 64, 64, 32, 2, 4),
    FlexBackward(32, 32, 32, 32, 2, 4),
    FlexBackward(16, 32, 32, 16, 2, 4),
    FlexBackward(16, 16, 16, 16, 1, 4),
)


def forward_bytes(
    tiles: FlexForward, head_size: int, dtype: torch.dtype, score_bytes: int, reads_shared: bool = False
) -> int:
    """Of shared memory.

    Args:
        score_bytes: that a kernel reads for each score, those of a boolean mask too. Triton loads them ahead like keys
            and values, where there is more than one stage.
        reads_shared: the card's products, those of 64 rows and more, read from shared memory, where all stages are.
    """
    row = next_power_of_two(head_size) * dtype.itemsize
    scores = tiles.rows * tiles.columns
    stages = tiles.stages if reads_shared and tiles.rows >= 64 else max(tiles.stages - 1, 1)
    ahead = stages * 2 * tiles.columns * row + (tiles.stages - 1) * scores * score_bytes
    weights = scores * dtype.itemsize if (tiles.rows, tiles.columns) != (128, 64) else 0
    return _BESIDE_FORWARD + tiles.rows * row + ahead + weights


def backward_bytes(
    tiles: FlexBackward, head_size: int, dtype: torch.dtype, score_bytes: int, reads_shared: bool = False
) -> int:
    """Of the larger of its halves: one keeps keys and walks queries, the other keeps queries and walks keys."""
    row = next_power_of_two(head_size) * dtype.itemsize
    halves = ((tiles.columns_kept, tiles.rows_walked), (tiles.rows_kept, tiles.columns_walked))
    is_shared = reads_shared and tiles.rows_walked >= 64
    stages = max(tiles.stages, 2)
    ahead = 2 * tiles.stages if is_shared else stages
    each = (stages - 1) * score_bytes + 4 * is_shared
    beside = _BESIDE_FORWARD if is_shared else _BESIDE_BACKWARD * dtype.itemsize
    return beside + max(2 * kept * row + ahead * walked * row + each * kept * walked for kept, walked in halves)


def options(
    card: Card | None, head_size: int, dtype: torch.dtype, score_bytes: int, chosen: FlexKernels | None
) -> dict[str, int]:
    """For the operator's kernels: nothing where one of those that Inductor has chosen fits, else its blocks in fewer
    stages, else smaller blocks.

    Args:
        card: None: not one of NVIDIA's, of which nothing is known here.
        score_bytes: that a kernel reads for each score.
        chosen: what Inductor would make; None: it is not known.
    """
    if card is None:
        return {}
    call = head_size, dtype, score_bytes, card.copies_tiles
    forward, backward = chosen or FlexKernels([], [])

    def fits(each: FlexForward) -> bool:
        return forward_bytes(each, *call) <= card.shared

    def fits_backward(each: FlexBackward) -> bool:
        return backward_bytes(each, *call) <= card.shared

    return {**_fitting(forward, _FORWARD, fits), **_fitting(backward, _BACKWARD, fits_backward)}


def _fitting(chosen: list[Tiles], smaller: tuple[Tiles, ...], fits: Callable[[Tiles], bool]) -> dict[str, int]:
    if any(map(fits, chosen)):
        return {}
    return next(each for each in itertools.chain(_with_fewer_stages(chosen), smaller) if fits(each)).options()


def _with_fewer_stages(tiles: list[Tiles]) -> Iterator[Tiles]:
    for each in tiles:
        for stages in range(each.stages - 1, 1, -1):
            yield replace(each, stages=stages)


def of_call(query: Tensor, score_bytes: int) -> dict[str, int]:
    """:func:`options` for a ``query [B, H, Q, D]`` where it is."""
    card, size = cards.of_device(query.device), query.shape[3]
    if card is None or not isinstance(size, int):
        return {}
    chosen = flex_kernels(size, query.dtype)
    return options(card, size, query.dtype, score_bytes, chosen)
