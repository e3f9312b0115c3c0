"""Kernels of an operator for the dispatch keys of autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DEVICE_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def outside_autocast() -> Any:
    """A context in which operators run as without autocast, on every device."""
    keys = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in DEVICE_KEYS.values()]
    return torch._C._ExcludeDispatchKeyGuard(keys[0] | keys[1])


def set_python_kernel(overload: Any, device_type: str, kernel: Callable[..., Any]) -> None:
    """Run ``kernel`` for ``overload`` under autocast, also while Python dispatches."""
    overload.py_impl(getattr(torch._C.DispatchKey, DEVICE_KEYS[device_type]))(kernel)
