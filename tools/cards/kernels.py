"""glue's own Triton kernels, in each configuration that their launches choose for a card."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from glue_compiler.ops import (
    expert_rows_triton,
    expert_sort_triton,
    group_bounds_triton,
    grouped_product_triton,
    grouped_rows_triton,
    mask_blocks_triton,
    nf4_triton,
    row_losses_triton,
)
from glue_compiler.ops.cards import Card
from tools.cards.compiling import AMD, Compiled, compiling_for, target_of

ROWS, EXPERTS, TOP_K, CLASSES = 4096, 8, 2, 150_000
AVERAGES = (8, 48, 512)
"""Rows of an expert, for each height of tiles."""
WIDTHS = (32, 64, 4096)
"""Of an expert's result: two of LoRA, and one of a layer, whose weight is large where K is of that size too."""
HALVES = (torch.float16, torch.bfloat16)
Launch = Callable[[], object]


def plain_launches(dtype: torch.dtype) -> dict[str, Launch]:
    """Kernels without products of matrices, by what they are for."""
    tokens, rows, slots = empty(ROWS, 2048, dtype=dtype), empty(ROWS * TOP_K, 2048, dtype=dtype), ROWS * TOP_K
    inverse, offsets, weights = ints(slots), ints(EXPERTS), empty(slots, dtype=dtype)
    logits, vector = empty(1024, CLASSES, dtype=dtype), empty(1024, dtype=torch.float32)
    target, place = empty(1024, dtype=torch.int64), empty(1024, dtype=torch.int64)
    mask = empty(1, 1, ROWS, ROWS, dtype=torch.bool)
    numbers = empty(1, 1, ROWS, ROWS, dtype=dtype)
    return {
        "sorting by expert": lambda: expert_sort_triton.sort(
            empty(ROWS, TOP_K, dtype=torch.int64), EXPERTS, k_major=True
        ),
        "rows to experts": lambda: expert_rows_triton.gather(tokens, inverse, offsets, TOP_K, weights),
        "rows from experts": lambda: expert_rows_triton.combine(rows, inverse, offsets, TOP_K, weights, dtype),
        "gradient of routing": lambda: expert_rows_triton.dot(rows, tokens, inverse, offsets, TOP_K, dtype),
        "sum by expert": lambda: grouped_rows_triton.sum_rows(rows, offsets),
        "bias by expert": lambda: grouped_rows_triton.repeat(empty(EXPERTS, 2048, dtype=dtype), offsets, slots),
        "bounds of experts": lambda: group_bounds_triton.bounds(offsets, slots, rows),
        "blocks of a boolean mask": lambda: mask_blocks_triton.lists(mask, "shows", has_mean=True),
        "blocks of a mask of numbers": lambda: mask_blocks_triton.lists(numbers, "added", has_mean=True),
        "weights of 4 bits": lambda: nf4_triton.launch(
            empty(ROWS * 1024, 1, dtype=torch.uint8),
            empty(128, dtype=torch.float32),
            empty(16, dtype=torch.float32),
            tokens,
            64,
            256,
            empty(ROWS * 32, dtype=torch.uint8),
            empty(256, dtype=torch.float32),
            empty(1, dtype=torch.float32),
        ),
        "cross entropy": lambda: row_losses_triton.cross_entropy(
            logits, target, vector, vector, empty(1, dtype=torch.float32), vector, place, 1.0, 30.0, gradient=True
        ),
        "statistics of logits": lambda: row_losses_triton.statistics(
            logits, target, vector, vector, vector, vector, place, 0.5, 30.0
        ),
        "their gradient": lambda: row_losses_triton.statistics_gradient(
            logits, target, vector, vector, vector, vector, vector, 0.5, 30.0
        ),
    }


def product_launches(dtype: torch.dtype) -> dict[str, Launch]:
    """Grouped products of stacked and of listed weights, and the gradient of weights."""
    found: dict[str, Launch] = {}
    for average in AVERAGES:
        for wide in WIDTHS:
            x, offsets = empty(average * EXPERTS, 4096, dtype=dtype), ints(EXPERTS)
            stack, bias = empty(EXPERTS, wide, 4096, dtype=dtype), empty(EXPERTS, wide, dtype=dtype)
            turned = stack.transpose(1, 2).contiguous()
            name = f"{average} rows x {wide}"
            found[f"product, {name}"] = partial(grouped_product_triton.linear, x, stack, offsets, bias, False)
            found[f"product, turned, {name}"] = partial(grouped_product_triton.linear, x, turned, offsets, None, True)
    left = empty(ROWS, 4096, dtype=dtype)
    for high, wide in ((4096, 4096), (32, 4096), (4096, 32)):
        pair = left[:, :high].contiguous(), left[:, :wide].contiguous()
        outer = partial(grouped_product_triton.outer, *pair, ints(EXPERTS))
        found[f"gradient of weights, {high} x {wide}"] = outer
    weights = [empty(4096, 4096, dtype=dtype) for _ in range(EXPERTS)]
    listed = partial(grouped_product_triton.linear_list, left, weights, ints(EXPERTS), [], False)
    found["product, listed weights"] = listed
    return found


def compiled_for(
    card: Card | None, launches: dict[str, Launch], *, assembles: bool = True
) -> Iterator[tuple[str, list[Compiled]]]:
    """(name, its kernels) on a card; None: AMD's gfx942."""
    target = AMD if card is None else target_of(card.capability)
    for name, launch in launches.items():
        with compiling_for(target, assembles=assembles) as found, seen_as(card):
            launch()
        yield name, found


@contextlib.contextmanager
def seen_as(card: Card | None) -> Iterator[None]:
    """Launches choose as on the card."""
    with (
        mock.patch("glue_compiler.ops.cards.of_device", return_value=card),
        mock.patch("glue_compiler.ops.grouped_product_triton.processor_count", return_value=64),
        mock.patch("glue_compiler.ops.group_bounds_triton.processor_count", return_value=64),
    ):
        yield


def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
    """Without memory: all that a compiler asks is dtype, alignment and strides."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def ints(size: int) -> Tensor:
    return empty(size, dtype=torch.int32)
