"""QuACK's grouped products for Hopper, of the package ``quack-kernels``, where that is installed.

Source: QuACK (Dao, Guo, Zadouri, 2025), whose CuTe kernels are compiled for dtypes and layouts when they are first
called, not for sizes: a batch with another number of rows compiles nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from glue_compiler.errors import GlueWarning
from glue_compiler.ops import cards, optional_package
from glue_compiler.ops.kernel_support import runs_triton, with_dense_rows

PACKAGE = "quack-kernels"
_LEAST = "0.6.5"
_MODULE = "quack.gemm"
_CALL = {"A", "B", "D", "C", "tile_count_semaphore", "rowvec_bias", "cu_seqlens_m", "cu_seqlens_k"}
_PARAMETERS = {
    "gemm": {*_CALL, "tile_M", "tile_N", "cluster_M", "cluster_N", "pingpong", "persistent"},
    "run_gemm_plan": {"plan", *_CALL},
}
"""Functions below the package's autograd and autotuner, and what they must take. ``gemm`` compiles, launches and gives
a plan, in which nothing depends on sizes; ``run_gemm_plan`` launches it again. ``gemm`` alone would keep one plan for
every number of rows."""

_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes, for addresses and strides: what the tensor memory accelerator reads
_ROWS_PER_EXPERT = 128
"""On average, from which on the kernels are taken: fewer leave tiles empty, and were not measured."""
_NARROWEST = 64
"""Columns of an operand and of a result, from which on: narrower ones, such as a LoRA's rank, leave tiles empty."""
_LARGEST = 2**31
"""Numbers in one tensor, below which offsets within it fit what the kernels compute them in."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One kernel: ``tile_m`` by ``tile_n`` numbers of the result in a block of threads, ``cluster_m`` by ``cluster_n``
    blocks that share what they read, and whether the halves of a block take turns (``pingpong``) or share a tile."""

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    pingpong: bool


LINEAR = Tiles(128, 128, 1, 2, pingpong=True)
OUTER = Tiles(128, 192, 2, 1, pingpong=True)
"""Fixed, as in ``grouped_product_tiles``: two runs take the same kernel. ``benchmarks/quack_products.py`` measures."""

_plans: dict[tuple[Any, ...], Any] = {}
_failed: set[tuple[Any, ...]] = set()
_lock = threading.Lock()


@functools.cache
def unusable() -> str | None:
    """Why the package cannot be used; None: it can. Imports it, which takes seconds, if it is installed."""
    return optional_package.why_unusable(PACKAGE, _LEAST, _MODULE, _PARAMETERS)


def _device_serves(tensor: Tensor) -> bool:
    return tensor.is_cuda and cards.has_wgmma(tensor.device) and runs_triton(tensor)


def pays(x: Tensor, weight: Tensor) -> bool:
    """Does the package compute ``x @ weight[e]``, and its gradients, faster than torch? By what is known of fakes.

    Args:
        x: ``[rows, K]``; more rows than are needed, if their number is not known.
        weight: ``[E, K, N]``.
    """
    experts, *widths = weight.shape
    rows = x.shape[0]
    return (
        x.is_cuda
        and cards.has_wgmma(x.device)
        and x.dtype == weight.dtype
        and x.dtype in _DTYPES
        and all(isinstance(width, int) and width >= _NARROWEST for width in widths)
        and all(width * x.element_size() % _ALIGNMENT == 0 for width in widths)
        and (not isinstance(rows, int) or rows >= _ROWS_PER_EXPERT * experts)
        and unusable() is None
    )


def serves_linear(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> bool:
    """True when the package computes ``grouped_linear`` of these tensors, and by measurement faster than others."""
    width = weight.shape[2 if transposed else 1]
    return (
        _device_serves(x)
        and _has_enough_rows(x, offsets)
        and min(x.shape[1], width) >= _NARROWEST
        and width * x.element_size() % _ALIGNMENT == 0
        and x.shape[0] * width < _LARGEST
        and _rows_fit(x)
        and _stack_fits(weight)
        and (bias is None or not bias.is_contiguous() or _is_aligned(bias))
        and unusable() is None  # last: it may import the package
    )


def serves_outer(left: Tensor, right: Tensor, offsets: Tensor) -> bool:
    """The same for ``grouped_outer``."""
    return (
        _device_serves(left)
        and _has_enough_rows(left, offsets)
        and min(left.shape[1], right.shape[1]) >= _NARROWEST
        and right.shape[1] * right.element_size() % _ALIGNMENT == 0
        and offsets.shape[0] * left.shape[1] * right.shape[1] < _LARGEST
        and _rows_fit(left)
        and _rows_fit(right)
        and unusable() is None
    )


def _has_enough_rows(rows: Tensor, offsets: Tensor) -> bool:
    experts = offsets.shape[0]
    return rows.dtype in _DTYPES and experts > 0 and rows.shape[0] >= _ROWS_PER_EXPERT * experts


def _rows_fit(matrix: Tensor) -> bool:
    if matrix.numel() >= _LARGEST:
        return False
    if matrix.stride(1) != 1:  # it is copied
        return matrix.shape[1] * matrix.element_size() % _ALIGNMENT == 0
    return _is_aligned(matrix, matrix.stride(0)) and matrix.stride(0) >= matrix.shape[1]


def _stack_fits(stack: Tensor) -> bool:
    inner = 2 if stack.stride(2) == 1 else 1
    row = stack.stride(3 - inner)
    return (
        stack.numel() < _LARGEST
        and stack.stride(inner) == 1
        and row >= stack.shape[inner]
        and stack.stride(0) > 0
        and _is_aligned(stack, row, stack.stride(0))
    )


def _is_aligned(tensor: Tensor, *strides: int) -> bool:
    element = tensor.element_size()
    return tensor.data_ptr() % _ALIGNMENT == 0 and all(stride * element % _ALIGNMENT == 0 for stride in strides)


def linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool, tiles: Tiles | None = None
) -> Tensor | None:
    """``grouped_linear`` of what :func:`serves_linear` accepts. None, with a warning: the kernel could not be made."""
    x = with_dense_rows(x)
    weight = weight.transpose(1, 2) if transposed else weight
    bias = None if bias is None else bias.contiguous()
    out = torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)
    bounds = _bounds(offsets, x.shape[0], clear=out)
    return _launch(x, weight, out, tiles or LINEAR, rowvec_bias=bias, cu_seqlens_m=bounds)


def outer(left: Tensor, right: Tensor, offsets: Tensor, tiles: Tiles | None = None) -> Tensor | None:
    """``grouped_outer`` of what :func:`serves_outer` accepts. None, with a warning: the kernel could not be made."""
    left, right = with_dense_rows(left), with_dense_rows(right)
    out = torch.empty((offsets.shape[0], left.shape[1], right.shape[1]), dtype=left.dtype, device=left.device)
    bounds = _bounds(offsets, left.shape[0])
    return _launch(left.t(), right.t(), out, tiles or OUTER, cu_seqlens_k=bounds)


def _bounds(offsets: Tensor, rows: int, clear: Tensor | None = None) -> Tensor:
    from glue_compiler.ops import group_bounds_triton  # Triton may not be installed

    return group_bounds_triton.bounds(offsets, rows, clear)


def _launch(
    a: Tensor, b: Tensor, out: Tensor, tiles: Tiles, *,
    rowvec_bias: Tensor | None = None, cu_seqlens_m: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Write ``out``, on torch's current stream of its device."""
    module = importlib.import_module(_MODULE)
    # All that a plan depends on: sizes, strides and addresses are read at each launch.
    majors = tuple(tensor.stride(-1) == 1 for tensor in (a, b))
    key = (out.device.index, out.dtype, majors, rowvec_bias is not None, cu_seqlens_m is not None, tiles)
    arguments = {"rowvec_bias": rowvec_bias, "cu_seqlens_m": cu_seqlens_m, "cu_seqlens_k": cu_seqlens_k}
    with torch.cuda.device(out.device):
        if plan := _plans.get(key):
            module.run_gemm_plan(plan, a, b, out, None, **arguments)
            return out
        with _lock:
            if key in _failed:
                return None
            try:
                _plans[key] = module.gemm(
                    a, b, out, None, None, tiles.tile_m, tiles.tile_n, tiles.cluster_m, tiles.cluster_n,
                    pingpong=tiles.pingpong, persistent=True, **arguments,
                )  # fmt: skip
            except Exception as error:  # a compiler, a driver or a version that does not fit
                _failed.add(key)
                warnings.warn(
                    f"{PACKAGE} {optional_package.installed_version(PACKAGE)} did not compute a grouped product, and "
                    "glue's own kernels do: "
                    f"{type(error).__name__}: {error}. options={{'kernels': 'torch'}} does not try it",
                    GlueWarning,
                    stacklevel=2,
                )
                return None
    return out
