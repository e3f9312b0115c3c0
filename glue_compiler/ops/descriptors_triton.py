"""Triton's tensor descriptors (Hopper's tensor memory accelerator), where a tensor's address and strides allow them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton: every kernel reads through pointers
    TensorDescriptor = None

_ALIGNMENT = 16  # bytes, for the address and all strides but the last


def _describe(tensor: Tensor, block: tuple[int, ...]) -> Any | None:
    element = tensor.element_size()
    fits = (
        TensorDescriptor is not None
        and tensor.stride(-1) == 1
        and tensor.numel() > 0
        and tensor.data_ptr() % _ALIGNMENT == 0
        and all(stride > 0 and stride * element % _ALIGNMENT == 0 for stride in tensor.stride()[:-1])
        # Coordinates are int32.
        and max(tensor.shape) < 2**31
    )
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block)) if fits else None


def of_matrix(matrix: Tensor, block: tuple[int, int]) -> Any | None:
    """A descriptor of a matrix with dense rows, or None where the hardware could not read it."""
    return _describe(matrix, block)


def of_batch(batch: Tensor, block: tuple[int, int, int]) -> Any | None:
    """A descriptor of ``[E, M, N]`` with dense rows, or None."""
    return _describe(batch, block)


def of_stack(stack: Tensor, block: tuple[int, int]) -> Any | None:
    """A descriptor of ``[E, N, K]`` with dense rows seen as a matrix ``[E * N, K]``, or None."""
    if stack.stride(0) != stack.shape[1] * stack.stride(1):
        return None
    matrix = torch.as_strided(
        stack, (stack.shape[0] * stack.shape[1], stack.shape[2]), stack.stride()[1:], stack.storage_offset()
    )
    return _describe(matrix, block)


def can_describe_table(strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether weights with these strides, at 16-byte aligned addresses, can be described on the device."""
    return 1 in strides[1:] and max(strides[1:]) * dtype.itemsize % _ALIGNMENT == 0


def with_scratch_memory(launch: Callable[[], Any], device: torch.device) -> None:
    """Run a launch whose kernel makes descriptors on the device, which it keeps in scratch memory from torch.

    The allocator is set in a copy of the context, so that the process's own Triton allocator stays as it is.
    """

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    def run() -> None:
        triton.set_allocator(allocate)
        launch()

    contextvars.copy_context().run(run)
