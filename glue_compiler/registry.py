"""Which passes exist, in the order in which they run when their contracts leave a choice."""

from __future__ import annotations

import functools
from importlib import import_module

from glue_compiler.graph_pass import GraphPass

_BUILT_IN = (
    "glue_compiler.passes.group_experts:GroupExperts",
    "glue_compiler.passes.specialize_attention:SpecializeAttention",
    "glue_compiler.passes.hoist_metadata:HoistMetadata",
    "glue_compiler.passes.memoize_metadata:MemoizeMetadata",
    "glue_compiler.passes.overlap_offload:OverlapOffload",
)


@functools.cache
def all_passes() -> tuple[GraphPass, ...]:
    """One object of each pass. Passes hold no state, so all compiles share them."""
    found = []
    for entry in _BUILT_IN:
        module, name = entry.split(":")
        found.append(getattr(import_module(module), name)())
    return tuple(found)


def pass_names() -> tuple[str, ...]:
    return tuple(graph_pass.name for graph_pass in all_passes())
