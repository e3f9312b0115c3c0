"""Autocast for custom operators: the dtype is read when the operator is called, as it is for ``F.linear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef, Library

from glue_compiler.compat.autocast_kernels import DEVICE_KEYS, outside_autocast, set_python_kernel

_library = Library("glue", "FRAGMENT")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    # Autocast leaves float64 alone, and so do we.
    eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if eligible else value


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` in the autocast dtype of the first one's device while autocast is on there, else as they are.

    For composite operators, which run with autocast still on.
    """
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(_cast(tensor, dtype) for tensor in tensors)


def run_in_autocast_dtype(operator: CustomOpDef) -> None:
    """Make ``operator`` cast its floating tensors (lists too) to the autocast dtype while autocast is on.

    ``torch.library.register_autocast`` fixes the dtype when it is called, which would turn float16 autocast into
    bfloat16; this reads ``torch.get_autocast_dtype`` at the call. The casts are differentiable.
    """
    namespace_and_name = operator._qualname
    packet = getattr(torch.ops.glue, namespace_and_name.split("::")[1])

    def kernel_for(device_type: str) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            with outside_autocast():
                return packet.default(*(_cast(argument, dtype) for argument in args))

        return kernel

    for device_type, key in DEVICE_KEYS.items():
        kernel = kernel_for(device_type)
        set_python_kernel(packet.default, device_type, kernel)
        _library.impl(namespace_and_name.split("::")[1], kernel, key)
