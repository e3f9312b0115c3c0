"""How the programs of a grouped product find their tile, on the device, from ``offsets`` alone.

Tiles are numbered expert by expert. Inside an expert they run down a band of ``GROUP_M`` tile rows before they move one
column to the right, so that programs that run side by side share weights and rows in the cache (the order of the Triton
tutorial "Matrix Multiplication").
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_groups(offsets, rows, num_experts, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """First row, end and number of tile rows of each expert; group ``num_experts`` holds the rows of no expert."""
    group = tl.arange(0, GROUPS)
    start = tl.load(offsets + group - 1, mask=(group > 0) & (group <= num_experts), other=0)
    start = tl.where(group > num_experts, rows, tl.minimum(start, rows))
    end = tl.minimum(tl.load(offsets + group, mask=group < num_experts, other=rows), rows)
    return start, end, (end - start + BLOCK_M - 1) // BLOCK_M


@triton.jit
def place_in_band(local, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile row and tile column of the ``local``-th tile of one expert."""
    band = local // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    in_band = local - band * GROUP_M * tiles_n
    return band * GROUP_M + in_band % height, in_band // height


@triton.jit
def find_tile(tile, start, end, tiles, tiles_through, tiles_n, GROUPS: tl.constexpr, GROUP_M: tl.constexpr):
    """Expert, first row and end of its rows, tile row and tile column of ``tile``."""
    before = tiles_through <= tile
    expert = tl.sum(before.to(tl.int32), 0)
    local = tile - tl.sum(tl.where(before, tiles, 0), 0) * tiles_n
    mine = tl.arange(0, GROUPS) == expert
    tiles_m = tl.sum(tl.where(mine, tiles, 0), 0)
    tile_m, tile_n = place_in_band(local, tiles_m, tiles_n, GROUP_M)
    return expert, tl.sum(tl.where(mine, start, 0), 0), tl.sum(tl.where(mine, end, 0), 0), tile_m, tile_n
