"""Methods of DTensor as Dynamo has them in its graphs."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch
from torch import fx

_MAKER = "torch._dynamo."


def arguments_of(node: fx.Node, method: str) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What else than the DTensor a call of its ``method`` is given; None if ``node`` is no such call.

    Torch 2.13 has methods in its graphs; 2.11 has a function for each call, which closes over the arguments.
    """
    if node.op == "call_method" and node.target == method:
        return node.args[1:], dict(node.kwargs)
    target = node.target
    if (
        isinstance(target, FunctionType)
        and target.__name__ == f"prim_{method}"
        and target.__module__.startswith(_MAKER)
    ):
        closed = inspect.getclosurevars(target).nonlocals
        if {"args_as_value", "kwargs_as_value"} <= closed.keys():
            return tuple(closed["args_as_value"]), dict(closed["kwargs_as_value"])
    return None


def is_dtensor(value: Any) -> bool:
    """Is it a tensor that ranks share?"""
    if not isinstance(value, torch.Tensor) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and imported where there is one

    return isinstance(value, DTensor)
