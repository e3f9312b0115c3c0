"""Dynamo: how it records code under ``torch.vmap``, between calls that open and close a level. Torch 2.11 to 2.15."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

from torch import fx

_MODULES = ("torch._functorch.predispatch", "torch._C._functorch", "torch._functorch.vmap")
_OPENS, _CLOSES, _LOADS = "_vmap_increment_nesting", "_vmap_decrement_nesting", "lazy_load_decompositions"
_BATCHES = ("_add_batch_dim", "_remove_batch_dim")


@functools.cache
def _functions(*names: str) -> frozenset[Any]:
    found = (getattr(importlib.import_module(module), name, None) for module in _MODULES for name in names)
    return frozenset(each for each in found if each is not None)


def segments(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes of each outermost ``vmap``, with those that open and close its levels."""
    opens, closes, loads = _functions(_OPENS), _functions(_CLOSES), _functions(_LOADS)
    found: list[fx.Node] = []
    depth = 0
    for node in list(graph.nodes):
        depth += node.target in opens
        if depth == 0:
            found = [node] if node.target in loads else []
        else:
            found.append(node)
        depth -= node.target in closes
        if depth == 0 and node.target in closes:
            yield found
            found = []


def is_of_another_transform(node: fx.Node) -> bool:
    """Is it of ``torch.func``, as ``grad`` and ``jvp`` are, and not of ``vmap`` alone?"""
    module = getattr(node.target, "__module__", None) or ""
    is_known = node.target in _functions(_OPENS, _CLOSES, _LOADS, *_BATCHES)
    return not is_known and module.startswith(("torch._functorch", "torch._C._functorch"))


def level_change(node: fx.Node) -> int:
    """1 for a node that opens a level, -1 for one that closes it."""
    return (node.target in _functions(_OPENS)) - (node.target in _functions(_CLOSES))


def close_level() -> None:
    from torch._C import _functorch

    _functorch._vmap_decrement_nesting()
