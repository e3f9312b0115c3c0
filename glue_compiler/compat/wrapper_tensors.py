"""Tensor subclasses that hold no memory. The parts used here are the same in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

WrapperT = TypeVar("WrapperT", bound=Tensor)

NO_TORCH_FUNCTION: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""As ``__torch_function__``: functions take the subclass as they take a tensor, and give no subclass back."""


def make(
    cls: type[WrapperT],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> WrapperT:
    """A tensor of this class, with a shape and no values."""
    return Tensor._make_wrapper_subclass(
        cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=device, requires_grad=False
    )
