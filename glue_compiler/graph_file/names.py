"""Functions and operators by name, and back."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from glue_compiler.errors import GlueGraphFileError

# Builtins do not say where they are to be found.
_MODULES_OF_BUILTINS = ("torch", "torch.nn.functional", "torch._C._nn", "torch._C", "operator", "math", "builtins")


def name_of(value: Any) -> str:
    """``"torch:ops.aten.add.Tensor"``, ``"torch.nn.functional:silu"``: what :func:`named` finds ``value`` by.

    Raises:
        GlueGraphFileError: if nothing does.
    """
    found = next((name for name in _candidates(value) if _is_found_by(name, value)), None)
    if found is None:
        raise GlueGraphFileError(f"{value!r} cannot be found by a name, so no other process could call it")
    return found


def _is_found_by(name: str, value: Any) -> bool:
    try:
        return named(name) is value
    except GlueGraphFileError:
        return False


def named(name: str) -> Any:
    """The object of that name.

    Raises:
        GlueGraphFileError: if there is none in this environment.
    """
    module, _, path = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise GlueGraphFileError(f"the graph uses '{name}', which is not here: {error}") from error
    return value


def _candidates(value: Any) -> list[str]:
    if isinstance(value, torch._ops.HigherOrderOperator):
        return [f"torch:ops.higher_order.{value.name()}"]
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return [f"torch:ops.{str(value).replace('::', '.')}"]
    name, module = getattr(value, "__name__", ""), getattr(value, "__module__", None)
    found = [f"{place}:{name}" for place in _MODULES_OF_BUILTINS if place in sys.modules]
    # Where it is defined comes last: names that users write stay, private modules move with torch's versions.
    return found if module is None else [*found, f"{module}:{getattr(value, '__qualname__', name)}"]
