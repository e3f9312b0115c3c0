"""Which tensors glue's own Triton kernels can serve; everything else runs the plain torch reference."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from glue_compiler.ops import cards


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_triton(tensor: Tensor, *, multiplies: bool = False) -> bool:
    """True when Triton is installed and ``tensor`` lives on a GPU that it compiles for.

    ``multiplies``: for a kernel with products of matrices.
    """
    if not (tensor.is_cuda and _triton_is_installed()):
        return False
    card = cards.of_device(tensor.device)
    if card is None or card.multiplies:
        return True
    return card.capability >= cards.CARDS[0].capability and not multiplies and tensor.dtype != torch.bfloat16


@functools.cache
def processor_count(index: int) -> int:
    """Number of multiprocessors of CUDA device ``index``: how many programs run side by side."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def next_power_of_two(number: int) -> int:
    """Smallest power of two that is at least ``number`` (and at least 1): Triton's blocks have such sizes."""
    return 1 << max(number - 1, 0).bit_length()


def accumulator_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float64 where one of the dtypes is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def product_precision(dtype: torch.dtype) -> str:
    """Triton's name of it: tf32 for float32 alone, and where torch's own products have it."""
    # ``allow_tf32`` raises where a program has said the same in the other way.
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def with_dense_rows(tensor: Tensor) -> Tensor:
    """``tensor`` if its last dimension is contiguous, else a contiguous copy (an expanded gradient, a transpose)."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
