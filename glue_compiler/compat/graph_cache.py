"""Graphs that AOTAutograd does not cache, though its key tells all that they do: each process would trace them anew."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.operators import AUTOGRAD_FUNCTION, is_of_others
from glue_compiler.compat.parts import ANY, Feature, Uses
from glue_compiler.compat.switches import AUTOCAST_SWITCHES

_MARKED = "unsafe_marked_cacheable_functions"
CACHED = Feature(
    "cache of graphs with autograd functions and autocast",
    {
        f"torch._inductor.config:{_MARKED}": ANY,
        "torch._functorch._aot_autograd.autograd_cache:BypassAOTAutogradCache": ANY,
        "torch._functorch._aot_autograd.autograd_cache:check_node_safe": Uses(("node",)),
        "torch._C:_autocast_supported_devices": ANY,
        "torch._ops:HigherOrderOperator.cacheable": Uses(("self",), (_MARKED,)),
    },
)
"""Without it, they are traced in each process."""


def cacheable_patch(graphs: Collection[fx.GraphModule], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inductor options with which a graph, given with the bodies in it, comes from the cache in a later process.

    What an autograd function does is told by its two bodies, which are in the key, and what autocast does by the
    arguments of its switches and :func:`_modes`, if all operators are known: those of others do in autograd and under
    autocast what Python has registered.
    """
    called = {node.target for gm in graphs for node in gm.graph.nodes if node.op == "call_function"}
    refused = {target for target in called if target in AUTOCAST_SWITCHES or target is AUTOGRAD_FUNCTION}
    if not refused or any(map(is_of_others, called)) or not CACHED.is_available():
        return {}
    from torch._inductor import config

    modes = _modes()
    marked = {f"{each.__module__}.{each.__name__}": modes for each in refused}
    patch = {_MARKED: {**options.get(_MARKED, getattr(config, _MARKED)), **marked}}
    return patch if _are_cached(graphs, patch) else {}


def _modes() -> str:
    """What operators do by a mode of the process or the thread, and which they are."""
    devices = torch._C._autocast_supported_devices()
    autocast = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices]
    packages = [getattr(sys.modules.get(name), "__version__", None) for name in ("bitsandbytes",)]
    return repr((torch.__version__, torch.get_default_dtype(), autocast, packages))


def _are_cached(graphs: Collection[fx.GraphModule], patch: Mapping[str, Any]) -> bool:
    """Would torch cache each node? It looks at those of the outermost graph alone."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_node_safe
    from torch._inductor import config

    with config.patch(dict(patch)):
        try:
            for gm in graphs:
                for node in gm.graph.nodes:
                    check_node_safe(node)
        except BypassAOTAutogradCache:
            return False
    return True
