"""Dynamo: NumPy calls, which it puts into a graph as wrappers around torch's own NumPy."""

from __future__ import annotations

from typing import Any


def numpy_function(target: Any) -> str | None:
    """``add`` for the call that Dynamo writes for ``numpy.add``, ``+`` and ``ndarray.__add__``; None for others."""
    from torch._dynamo import utils

    if isinstance(target, utils.numpy_to_tensor_wrapper):
        return getattr(target.f, "__name__", None)
    if isinstance(target, utils.numpy_method_wrapper):
        return target.method
    if isinstance(target, utils.numpy_operator_wrapper):
        return target.op.__name__
    return None
