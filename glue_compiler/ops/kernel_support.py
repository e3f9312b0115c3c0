"""Which tensors glue's own Triton kernels can serve; everything else runs the plain torch reference."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _device_runs_triton(index: int) -> bool:
    # bf16 matrix instructions start with compute capability 8.0; ROCm reports its own numbers, all above it.
    return torch.cuda.get_device_capability(index) >= (8, 0)


def runs_triton(tensor: Tensor) -> bool:
    """True when Triton is installed and ``tensor`` lives on a GPU that it compiles for."""
    return tensor.is_cuda and _triton_is_installed() and _device_runs_triton(tensor.device.index)


@functools.cache
def processor_count(index: int) -> int:
    """Number of multiprocessors of CUDA device ``index``: how many programs run side by side."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def next_power_of_two(number: int) -> int:
    """Smallest power of two that is at least ``number`` (and at least 1): Triton's blocks have such sizes."""
    return 1 << max(number - 1, 0).bit_length()


def with_dense_rows(tensor: Tensor) -> Tensor:
    """``tensor`` if its last dimension is contiguous, else a contiguous copy (an expanded gradient, a transpose)."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
