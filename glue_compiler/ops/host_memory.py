"""Comparing tensors in host memory, byte by byte."""

from __future__ import annotations

import ctypes
import os

import torch

# torch.equal compares element by element, which takes five times as long.
_memcmp = ctypes.CDLL("msvcrt" if os.name == "nt" else None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


def holds_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Does ``tensor`` hold what it held when ``copy`` was its ``clone()``? Both integers or booleans on the CPU."""
    if tensor.is_contiguous() and copy.is_contiguous() and not tensor.is_neg() and tensor.nbytes == copy.nbytes:
        return bool(_memcmp(tensor.data_ptr(), copy.data_ptr(), copy.nbytes) == 0)
    return torch.equal(tensor, copy)
