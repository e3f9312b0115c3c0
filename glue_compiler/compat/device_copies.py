"""Nodes of ATen graphs that copy a tensor to another device and do nothing else, as torch 2.11 to 2.15 write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_KEEPING = (None, torch.preserve_format)


def copied_from(node: fx.Node) -> fx.Node | None:
    """The tensor that ``node`` copies to a device that it names, with the same strides; None if it does more."""
    if node.op != "call_function":
        return None
    if node.target is torch.ops.aten._to_copy.default:
        named = dict(node.kwargs)
        named.pop("non_blocking", None)
        is_copy = named.pop("device", None) is not None and named.pop("memory_format", None) in _KEEPING
        # The dtype is checked by whoever compares the two values.
        named.pop("dtype", None)
        return _node(node.args[0]) if is_copy and not any(v not in (None, False) for v in named.values()) else None
    if node.target is torch.ops.prims.device_put.default:
        return _node(node.args[0])
    # Came with torch 2.12; 2.11 writes streams into the graph instead, and those are left alone.
    if _is_ao(node.target, "wait_tensor"):
        start = _node(node.args[0])
        if start is not None and (_is_ao(start.target, "offload") or _is_ao(start.target, "reload")):
            return _node(start.args[0])
    return None


def start_of(node: fx.Node) -> fx.Node | None:
    """The node that starts the copy which ``node`` ends, where those are two."""
    return _node(node.args[0]) if _is_ao(node.target, "wait_tensor") else None


def _is_ao(target: Any, name: str) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == f"ao::{name}"


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None
