"""Operators that compilers call as they are: for eager code, and for compiled graphs.

``torch.library.custom_op`` puts Python around a kernel, for autograd, devices and a check of aliases: 8 us a call, 30
on a slow host. Below autograd none of it has an effect, so what Inductor compiles calls the kernel alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.library import CustomOpDef, Library, custom_op

_direct = Library("glue_direct", "FRAGMENT")


def opaque(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as ``torch.ops.glue.<name>``, a custom operator that writes to none of its operands, and its
    kernel alone as ``torch.ops.glue_direct.<name>``."""

    def register(function: Callable[..., Any]) -> CustomOpDef:
        definition = custom_op(f"glue::{name}", mutates_args=())(function)
        overload = getattr(torch.ops.glue, name).default
        _direct.define(f"{name}{torch.library.infer_schema(function, mutates_args=())}", tags=overload.tags)
        _direct.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"glue_direct::{name}", overload, lib=_direct)
        return definition

    return register


def call_directly(graph: fx.Graph) -> None:
    """Call the kernels of glue's operators in ``graph``, which nothing differentiates any more.

    Args:
        graph: of ATen operators, as compilers of AOTAutograd get it. Changed in place.
    """
    for node in graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "glue":
            direct = getattr(torch.ops.glue_direct, target.name().removeprefix("glue::"), None)
            node.target = target if direct is None else direct.default
