"""What is known of the experts that a token selects. Read from data flow; changes nothing."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.effects import Effects
from glue_compiler.fx.spellings import TOP_K
from glue_compiler.fx.values import storage_of, value_of

_SAME_NUMBERS = {"to", "long", "int", "contiguous", "clone", "detach", "view", "reshape", "flatten", torch.flatten}
_INDICES = (torch.int32, torch.int64)


def are_distinct(selected: fx.Node, effects: Mapping[fx.Node, Effects]) -> bool:
    """Does each row of ``selected``, ``[tokens, slots]`` or ``[tokens]``, name an expert at most once?

    It does if there is one slot, or if the rows are those of the indices of ``topk``, which nothing writes.
    """
    shape = value_of(selected).shape
    if len(shape) == 1 or _is_known(shape[-1], 1):
        return True
    node: Any = selected
    storages = set()
    while isinstance(node, fx.Node) and _has_rows_of(node, shape):
        storages.add(storage_of(value_of(node)))
        if node.target is operator.getitem and node.args[1] == 1:
            top: Any = node.args[0]
            dim = top.args[2] if len(top.args) > 2 else top.kwargs.get("dim", -1)
            is_written = any(storages & each.writes for each in effects.values())
            return top.target in TOP_K and dim in (-1, len(shape) - 1) and not is_written
        if node.target not in _SAME_NUMBERS:
            return False
        node = node.args[0]
    return False


def _has_rows_of(node: fx.Node, shape: Any) -> bool:
    """Rows of the same length, in a dtype that holds every index: then it has the same rows."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.dtype not in _INDICES or value.dim() != len(shape):
        return False
    return isinstance(shape[-1], int) and _is_known(value.shape[-1], shape[-1])


def _is_known(size: Any, wanted: int) -> bool:
    """Asks no symbol for its value, so it adds no guard."""
    return type(size) is int and size == wanted
