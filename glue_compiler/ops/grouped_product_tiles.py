"""Tile sizes of the grouped products: a fixed choice by shape and device, so that two runs take the same one.

Nothing here is tuned at run time: an autotuner would time kernels, wait for the device and may choose differently in
the next process, which changes the order of sums. The choices for bf16 were measured on one H200 with torch 2.11
(``benchmarks/expert_operators.py``).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from glue_compiler.ops import cards


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One kernel configuration.

    ``block_k`` runs along the contraction; ``group_m`` is the height of a band of tiles; ``programs_per_processor`` 0
    means one program for each tile, else that many programs stay on each multiprocessor and walk the tiles;
    ``descriptors`` reads through the tensor memory accelerator where strides and addresses allow.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    warps: int
    stages: int
    programs_per_processor: int = 0
    descriptors: bool = False


def _is_large(tensor: Tensor) -> bool:
    card = cards.of_device(tensor.device)
    return card is not None and card.copies_tiles


_LARGE_WEIGHT = 12_000_000
"""Numbers of one expert's weight from which on twice as wide tiles are faster (by 4%), where they can be described."""


def linear_tiles(rows: int, experts: int, wide: int, x: Tensor, k_minor: bool = False) -> Tiles:
    """Tiles for ``x [rows, K]`` times ``E`` weights ``[K, wide]``: as high as the average expert has rows.

    ``k_minor``: K is contiguous in a weight, so that the tensor memory accelerator reads it.
    """
    average = rows // experts
    if x.dtype == torch.float64:
        return Tiles(32, 32, 16, 8, 4, 2)
    if x.dtype == torch.float32:
        return Tiles(64 if average >= 48 else 16, 64, 32, 8, 4, 3)
    large = _is_large(x)
    if average >= 96 and large and k_minor and wide * x.shape[1] >= _LARGE_WEIGHT:
        return Tiles(128, 256, 64, 16, 8, 3, 1, descriptors=True)
    if average >= 96 and wide >= 128:
        return Tiles(128, 128, 64, 8, 4, 3, 2, descriptors=True) if large else Tiles(128, 128, 32, 8, 4, 3)
    if average >= 32:
        return Tiles(64, 128 if wide >= 128 else 64, 64, 8, 4, 3, descriptors=large)
    return Tiles(16, 128 if wide >= 128 else 32, 64, 8, 4, 3)


def outer_tiles(high: int, wide: int, left: Tensor) -> Tiles:
    """Tiles for ``E`` products ``[high, rows of e] x [rows of e, wide]``."""
    if left.dtype == torch.float64:
        return Tiles(32, 32, 16, 8, 4, 2)
    if left.dtype == torch.float32:
        return Tiles(64, 64, 32, 8, 4, 3)
    if high >= 128 and wide >= 128:
        return Tiles(128, 128, 64, 16, 8, 3, descriptors=True) if _is_large(left) else Tiles(128, 128, 32, 16, 8, 3)
    return Tiles(16 if high <= 32 else 64, 32 if wide <= 32 else 64, 64, 8, 4, 3)
