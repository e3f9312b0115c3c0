"""How many tensors refer to a piece of memory: private in torch 2.11 to 2.15."""

from __future__ import annotations

import torch


def use_count(tensor: torch.Tensor) -> int:
    """References to the storage of ``tensor``; to be compared with an earlier count, not to be read as a number."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
