"""What a compile must leave as it was: torch's modes and settings, and Dynamo's own code."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from glue_compiler.compat.switches import autocast_nesting


@dataclass(frozen=True)
class ProcessState:
    settings: dict[str, Any]
    parts: dict[tuple[str, str], Any]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(_settings(), _parts())

    def differences(self) -> list[str]:
        """What is not as it was."""
        settings, parts = _settings(), _parts()
        found = [
            f"{name}: was {old}, is {settings[name]}" for name, old in self.settings.items() if old != settings[name]
        ]
        found += [f"{'.'.join(key)} is another object" for key, old in self.parts.items() if parts.get(key) is not old]
        return [f"left behind: {each}" for each in found]


def _settings() -> dict[str, Any]:
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


def _parts() -> dict[tuple[str, str], Any]:
    """The methods of Dynamo's classes, which capture replaces for a while."""
    return {
        (f"{module.__name__}.{kind.__name__}", name): part
        for module in [m for n, m in sys.modules.items() if n.startswith("torch._dynamo.variables.") or n in _PATCHED]
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
        for name, part in vars(kind).items()
        if callable(part)
    }


_PATCHED = ("torch._dynamo.side_effects", "torch._dynamo.symbolic_convert", "torch._dynamo.output_graph")
