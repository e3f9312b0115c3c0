"""How many rows of logits exist at a time where a loss is computed in chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glue_compiler.ops.device_memory import size_of


@dataclass(frozen=True)
class ChunkLimits:
    """Bytes of logits to aim at, rows below which products are slow, and what row counts are rounded up to."""

    target_bytes: int
    least_rows: int
    multiple: int


# On a GPU each chunk reads and writes the sum of the weight's gradient once more, and products of few rows leave
# multiprocessors without work; a CPU is busy with few rows.
_SHARE = 40
"""Of a device's memory a chunk is this part at most: 200 MiB of 8 GiB, and all of the target from 20 GiB on."""
LIMITS = {"cuda": ChunkLimits(512 * 2**20, 1024, 512), "cpu": ChunkLimits(64 * 2**20, 64, 16)}


def row_chunks(rows: int, row_bytes: int, device: torch.device, sums: int = 0) -> list[slice]:
    """Slices that cut ``rows`` rows of logits, of ``row_bytes`` each, into chunks of nearly one size.

    A chunk has about the target's bytes, and up to about twice as many where the target is less than the least rows;
    all rows are one where they have no more than ``sums`` bytes, which several chunks would need beside one of them.
    """
    if rows == 0:
        return []
    if rows * row_bytes <= sums:
        return [slice(0, rows)]
    limits = LIMITS.get(device.type, LIMITS["cpu"])
    target, multiple, memory = limits.target_bytes, limits.multiple, size_of(device)
    if memory is not None and memory // _SHARE < target:
        target = memory // _SHARE
        while multiple > 16 and 8 * multiple * row_bytes > target:  # rounding takes an eighth more at most
            multiple //= 2
    fitting = target // row_bytes
    most = max(fitting, min(limits.least_rows, 2 * fitting), 1)
    even = -(-rows // -(-rows // most))
    size = -(-even // multiple) * multiple
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
