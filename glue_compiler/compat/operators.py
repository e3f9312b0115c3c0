"""Who registered an operator, and whether its result is new memory (2.11 to 2.15)."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

AUTOGRAD_FUNCTION: Any = torch.ops.higher_order.autograd_function_apply
"""What Dynamo makes of a call of a ``torch.autograd.Function``: its forward and its backward are bodies."""
_BUILT_IN = {"aten", "prims", "prim"}

_DOES_MORE = {
    *("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "fsdp", "symm_mem"),
    *("debug_mode_ops", "debugprims", "export", "inductor", "inductor_prims", "profiler", "rngprims", "static_runtime"),
}
"""Namespaces of torch's own whose operators communicate, count or guard beside what their schema says."""


def computes_alone(overload: torch._ops.OpOverload) -> bool:
    """Does it compute new tensors from its operands, as far as its schema says, and nothing else?

    Views of torch's own operators count; what an operator of another package hands on must be new.
    """
    schema = overload._schema
    may_alias = bool(operators_in(overload)) and any(result.alias_info is not None for result in schema.returns)
    return not schema.is_mutable and not may_alias and overload.namespace not in _DOES_MORE


def operators_in(target: Any) -> list[str]:
    """``["mine::scale"]`` for an operator that ``import torch`` alone may not register."""
    if not isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return []
    name = target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else target._schema.name
    return [] if name.split("::")[0] in _BUILT_IN else [name]


def inductors_own_in(target: Any) -> str | None:
    """The module that registers ``target``, an operator of Inductor's among torch's ``prims``; None: it is none."""
    module = "torch._inductor.inductor_prims"
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "prims":
        return None
    return module if hasattr(sys.modules.get(module), target._opname) else None


_KNOWN = {"glue", "bitsandbytes"}
"""Namespaces of operators that give the same for the same operands, and whose autograd is no more than they say."""


def is_of_others(target: Any) -> bool:
    """Is it an operator that may do, in autograd, under autocast or with random numbers, what Python has registered?"""
    return any(name.split("::")[0] not in _KNOWN for name in operators_in(target))


_ALLOCATING_COMPOSITES = {"aten::linear", "aten::conv1d", "aten::conv2d", "aten::conv3d"}


def allocates(overload: Any) -> bool:
    """Does each call of the operator give new memory, whatever it is given?

    Its schema must say so; but of those that are made of other operators some give their operand back all the same
    (``type_as``, ``dropout``, ``sum_to_size``), and the few known ones are named.
    """
    schema = overload._schema
    if operators_in(overload) or any(result.alias_info is not None for result in schema.returns):
        return False
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
    return not is_composite or schema.name in _ALLOCATING_COMPOSITES


def registered_at(name: str) -> str:
    """The file and line that registered an operator, ``scale.py:12``; ``""`` if it is not known."""
    from torch._library.custom_ops import OPDEFS

    if (definition := OPDEFS.get(name)) is not None:
        code = getattr(definition._init_fn, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    found = re.search(r"^debug: registered at (.*)$", torch._C._dispatch_dump(name), re.MULTILINE)
    return found[1] if found else ""


def registering_module(name: str) -> str | None:
    """The module to import before an operator can be called; None if none is known that another process could import.

    Operators of C++ extensions are registered by the package that carries their namespace's name, where there is one.
    """
    file = registered_at(name).rpartition(":")[0]
    modules = list(sys.modules.items())
    found = next((key for key, value in modules if getattr(value, "__file__", None) == file), None) if file else None
    namespace = name.split("::")[0]
    found = found or (namespace if namespace in sys.modules else None)
    return None if found in (None, "__main__") else found
