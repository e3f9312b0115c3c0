"""Pieces of memory: which one a tensor lies in, and how many tensors refer to it. Private in torch 2.11 to 2.15."""

from __future__ import annotations

import torch


def identity(tensor: torch.Tensor) -> int:
    """Equal for two tensors, fake ones too, exactly when they are views of the same memory."""
    return int(tensor.untyped_storage()._cdata)


def use_count(tensor: torch.Tensor) -> int:
    """References to the storage of ``tensor``; to be compared with an earlier count, not to be read as a number."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
