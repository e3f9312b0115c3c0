"""Triton kernels of ``grouped_linear`` (stacked weights or a table of addresses) and ``grouped_outer``.

Both kernels walk output tiles in a fixed order and write each tile once: no atomics, no split sums. Which expert a tile
belongs to follows from ``offsets`` on the device, so the host never reads a count.

Source: grouped GEMM with a device-side tile schedule, as in the Triton tutorial "Group GEMM" and MegaBlocks (Gale et
al., 2023); the grouped tile order inside an expert is that of the Triton tutorial "Matrix Multiplication".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from glue_compiler.ops import descriptors_triton as descriptors
from glue_compiler.ops.address_table import address_table
from glue_compiler.ops.grouped_product_tiles import Tiles, linear_tiles, outer_tiles
from glue_compiler.ops.grouped_tile_walk import find_tile, place_in_band, read_groups
from glue_compiler.ops.kernel_support import (
    next_power_of_two,
    processor_count,
    product_precision,
    with_dense_rows,
)


@triton.jit
def _linear_kernel(
    x, x_descriptor, weight, weight_descriptor, offsets, bias, out, rows, num_experts, N, K,
    x_stride, weight_stride_expert, weight_stride_k, weight_stride_n, bias_stride,
    X_DESCRIPTOR: tl.constexpr, WEIGHT_DESCRIPTOR: tl.constexpr, WEIGHT_TABLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Tiles of ``out[rows of e] = x[rows of e] @ weight[e] + bias[e]``; group ``num_experts`` is the rows of no expert.

    ``x`` and ``weight`` are read through pointers or through descriptors (tensor memory accelerator); ``weight`` and
    ``bias`` are tensors or, with WEIGHT_TABLE, tables of addresses. A described weight is [N, K] with K contiguous.
    """
    group_start, group_end, group_tiles = read_groups(offsets, rows, num_experts, GROUPS, BLOCK_M)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_through = tl.cumsum(group_tiles, 0) * tiles_n
    tiles = tl.sum(group_tiles, 0) * tiles_n

    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, start, end, tile_m, tile_n = find_tile(
            tile, group_start, group_end, group_tiles, tiles_through, tiles_n, GROUPS, GROUP_M
        )
        first_row = start + tile_m * BLOCK_M
        first_column = tile_n * BLOCK_N
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        belongs = expert < num_experts
        safe_expert = tl.where(belongs, expert, 0)
        if WEIGHT_TABLE:
            base = tl.multiple_of(tl.load(weight + safe_expert).to(tl.pointer_type(x.dtype.element_ty)), 16)
            described_row = first_column
            if WEIGHT_DESCRIPTOR:
                described = tl.make_tensor_descriptor(base, [N, K], [weight_stride_n, 1], [BLOCK_N, BLOCK_K])
        else:
            base = weight + safe_expert.to(tl.int64) * weight_stride_expert
            # One descriptor for the stack, whose experts' rows lie below each other.
            described_row = safe_expert * N + first_column
            if WEIGHT_DESCRIPTOR:
                described = weight_descriptor
        # Rows past the group's end are computed from other rows and not stored; clamping keeps the loads inside.
        x_places = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
        weight_places = base + k.to(tl.int64)[:, None] * weight_stride_k
        weight_places += column.to(tl.int64)[None, :] * weight_stride_n
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=WORK)
        # Rows of no expert run no step of this loop and stay zero.
        for step in range(tl.where(belongs, (K + BLOCK_K - 1) // BLOCK_K, 0)):
            done = step * BLOCK_K
            if X_DESCRIPTOR:
                x_tile = x_descriptor.load([first_row, done])
            elif EVEN_K:
                x_tile = tl.load(x_places)
            else:
                x_tile = tl.load(x_places, mask=(k < K - done)[None, :], other=0.0)
            if WEIGHT_DESCRIPTOR:
                weight_tile = described.load([described_row, done]).T
            elif EVEN_K:
                weight_tile = tl.load(weight_places, mask=(column < N)[None, :], other=0.0)
            else:
                weight_tile = tl.load(weight_places, mask=(k < K - done)[:, None] & (column < N)[None, :], other=0.0)
            total = tl.dot(x_tile, weight_tile, total, input_precision=PRECISION, out_dtype=WORK)
            x_places += BLOCK_K
            weight_places += BLOCK_K * weight_stride_k
        if HAS_BIAS:
            if WEIGHT_TABLE:
                bias_base = tl.load(bias + safe_expert).to(tl.pointer_type(x.dtype.element_ty))
            else:
                bias_base = bias + safe_expert.to(tl.int64) * bias_stride
            added = tl.load(bias_base + column, mask=(column < N) & belongs, other=0.0)
            total += added.to(WORK)[None, :]
        places = out + row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < N)[None, :])


@triton.jit
def _outer_kernel(
    left, left_descriptor, right, right_descriptor, offsets, out, out_descriptor, rows, M, N, left_stride, right_stride,
    LEFT_DESCRIPTOR: tl.constexpr, RIGHT_DESCRIPTOR: tl.constexpr, OUT_DESCRIPTOR: tl.constexpr,
    WORK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of ``out[e] = left[rows of e].T @ right[rows of e]`` per program, expert by expert."""
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = place_in_band(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    first_m = tile_m * BLOCK_M
    first_n = tile_n * BLOCK_N
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside_m = (m < M)[None, :]
    inside_n = (n < N)[None, :]

    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    count = tl.maximum(tl.minimum(tl.load(offsets + expert), rows) - start, 0)
    steps = count // BLOCK_K
    first = (start + k).to(tl.int64)[:, None]
    left_places = left + first * left_stride + m[None, :]
    right_places = right + first * right_stride + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=WORK)
    for step in range(steps):
        if LEFT_DESCRIPTOR:
            left_tile = left_descriptor.load([start + step * BLOCK_K, first_m])
        else:
            left_tile = tl.load(left_places, mask=inside_m, other=0.0)
        if RIGHT_DESCRIPTOR:
            right_tile = right_descriptor.load([start + step * BLOCK_K, first_n])
        else:
            right_tile = tl.load(right_places, mask=inside_n, other=0.0)
        total = tl.dot(left_tile.T, right_tile, total, input_precision=PRECISION, out_dtype=WORK)
        left_places += BLOCK_K * left_stride
        right_places += BLOCK_K * right_stride
    remaining = count - steps * BLOCK_K
    if remaining > 0:
        # Masked, so never through descriptors, which would bring the next expert's rows (and its NaN) into the product.
        inside_k = (k < remaining)[:, None]
        tail = (start + steps * BLOCK_K + k).to(tl.int64)[:, None]
        left_tile = tl.load(left + tail * left_stride + m[None, :], mask=inside_k & inside_m, other=0.0)
        right_tile = tl.load(right + tail * right_stride + n[None, :], mask=inside_k & inside_n, other=0.0)
        total = tl.dot(left_tile.T, right_tile, total, input_precision=PRECISION, out_dtype=WORK)
    result = total.to(out.dtype.element_ty)
    if OUT_DESCRIPTOR:
        out_descriptor.store([expert, first_m, first_n], result.reshape(1, BLOCK_M, BLOCK_N))
    else:
        places = out + (expert.to(tl.int64) * M + m.to(tl.int64)[:, None]) * N + n[None, :]
        tl.store(places, result, mask=(m < M)[:, None] & (n < N)[None, :])


def _work(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool, tiles: Tiles | None = None
) -> Tensor:
    """``grouped_linear`` on the GPU, for every dtype and stride."""
    weight = weight if 1 in weight.stride()[-2:] else weight.contiguous()
    weight = weight.transpose(1, 2) if transposed else weight
    return _launch_linear(
        with_dense_rows(x), weight, offsets, None if bias is None else with_dense_rows(bias), table=False,
        size=(weight.shape[1], weight.shape[2]), strides=(weight.stride(0), weight.stride(2), weight.stride(1)),
        tiles=tiles,
    )  # fmt: skip


def linear_list(
    x: Tensor, weights: Sequence[Tensor], offsets: Tensor, biases: Sequence[Tensor], transposed: bool
) -> Tensor:
    """``grouped_linear_list`` on the GPU; weights not aligned to 16 bytes or not strided like the first are copied."""
    strides = weights[0].stride() if 1 in weights[0].stride() else weights[0].contiguous().stride()
    weights = [
        weight if weight.stride() == strides and weight.data_ptr() % 16 == 0 else _like(weight, strides)
        for weight in weights
    ]
    deep_dim, wide_dim = (0, 1) if transposed else (1, 0)
    biases = [with_dense_rows(bias) for bias in biases]
    return _launch_linear(
        with_dense_rows(x), address_table(weights), offsets, address_table(biases) if biases else None, table=True,
        size=(weights[0].shape[wide_dim], weights[0].shape[deep_dim]),
        strides=(0, strides[deep_dim], strides[wide_dim]),
    )  # fmt: skip


def _launch_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, *,
    table: bool, size: tuple[int, int], strides: tuple[int, int, int], tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    rows, (wide, deep), experts = x.shape[0], size, offsets.shape[0]
    out = torch.empty((rows, wide), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    k_minor = strides[1] == 1
    tiles = tiles or linear_tiles(rows, experts, wide, x, k_minor)
    x_descriptor = descriptors.of_matrix(x, (tiles.block_m, tiles.block_k)) if tiles.descriptors else None
    # Weights with N contiguous come faster through pointers (by 2 to 12% on an H200), so only the others are described.
    describe = tiles.descriptors and k_minor
    weight_block = (tiles.block_n, tiles.block_k)
    weight_descriptor = descriptors.of_stack(weight, weight_block) if describe and not table else None
    describe_table = describe and table and descriptors.can_describe_table(strides, x.dtype)
    # Every group, the rows of no expert included, can end in one tile that is not full.
    programs = (triton.cdiv(rows, tiles.block_m) + experts) * triton.cdiv(wide, tiles.block_n)
    if tiles.programs_per_processor:
        programs = min(programs, tiles.programs_per_processor * processor_count(x.device.index))
    launch = functools.partial(
        _linear_kernel[(programs,)],
        x, x_descriptor, weight, weight_descriptor, offsets.contiguous(), bias, out, rows, experts, wide, deep,
        x.stride(0), *strides, bias.stride(0) if bias is not None else 0,
        X_DESCRIPTOR=x_descriptor is not None, WEIGHT_DESCRIPTOR=describe_table or weight_descriptor is not None,
        WEIGHT_TABLE=table, HAS_BIAS=bias is not None, GROUPS=max(64, next_power_of_two(experts + 1)),
        WORK=_work(x.dtype), PRECISION=product_precision(x.dtype), EVEN_K=deep % tiles.block_k == 0,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP_M=tiles.group_m,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if describe_table:
        descriptors.with_scratch_memory(launch, x.device)
    else:
        launch()
    return out


def outer(left: Tensor, right: Tensor, offsets: Tensor, tiles: Tiles | None = None) -> Tensor:
    """``grouped_outer`` on the GPU, for every dtype and stride."""
    left, right = with_dense_rows(left), with_dense_rows(right)
    rows, experts, high, wide = left.shape[0], offsets.shape[0], left.shape[1], right.shape[1]
    out = torch.empty((experts, high, wide), dtype=left.dtype, device=left.device)
    if out.numel() == 0:
        return out
    if rows == 0:
        return out.zero_()
    tiles = tiles or outer_tiles(high, wide, left)
    left_descriptor = right_descriptor = out_descriptor = None
    if tiles.descriptors:
        left_descriptor = descriptors.of_matrix(left, (tiles.block_k, tiles.block_m))
        right_descriptor = descriptors.of_matrix(right, (tiles.block_k, tiles.block_n))
        out_descriptor = descriptors.of_batch(out, (1, tiles.block_m, tiles.block_n))
    programs = experts * triton.cdiv(high, tiles.block_m) * triton.cdiv(wide, tiles.block_n)
    _outer_kernel[(programs,)](
        left, left_descriptor, right, right_descriptor, offsets.contiguous(), out, out_descriptor, rows, high, wide,
        left.stride(0), right.stride(0),
        LEFT_DESCRIPTOR=left_descriptor is not None, RIGHT_DESCRIPTOR=right_descriptor is not None,
        OUT_DESCRIPTOR=out_descriptor is not None, WORK=_work(left.dtype), PRECISION=product_precision(left.dtype),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP_M=tiles.group_m,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _like(weight: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(weight.shape, strides, dtype=weight.dtype, device=weight.device).copy_(weight)
