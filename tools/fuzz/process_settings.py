"""Torch's modes and settings of this process, and the code of Dynamo's that capture replaces for a while."""

from __future__ import annotations

import sys
from typing import Any

import torch

from glue_compiler.compat.switches import autocast_nesting

_PATCHED = ("torch._dynamo.side_effects", "torch._dynamo.symbolic_convert", "torch._dynamo.output_graph")


def settings() -> dict[str, Any]:
    config = torch._dynamo.config
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "autocast on CUDA": torch.is_autocast_enabled("cuda"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast regions": autocast_nesting(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "capture_scalar_outputs": config.capture_scalar_outputs,
        "capture_dynamic_output_shape_ops": config.capture_dynamic_output_shape_ops,
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),  # type: ignore[attr-defined]
    }


def methods_of_dynamo() -> dict[tuple[str, str], Any]:
    return {
        (f"{module.__name__}.{kind.__name__}", name): part
        for module in [m for n, m in sys.modules.items() if n.startswith("torch._dynamo.variables.") or n in _PATCHED]
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
        for name, part in vars(kind).items()
        if callable(part)
    }
