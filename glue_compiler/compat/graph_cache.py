"""Graphs that AOTAutograd does not cache, though its key tells all that they do: each process would trace them anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.parts import ANY, Feature, Uses
from glue_compiler.compat.switches import AUTOCAST_SWITCHES

_MARKED = "unsafe_marked_cacheable_functions"
CACHED = Feature(
    "cache of graphs with autograd functions and autocast",
    {
        f"torch._inductor.config:{_MARKED}": ANY,
        "torch._functorch._aot_autograd.autograd_cache:BypassAOTAutogradCache": ANY,
        "torch._functorch._aot_autograd.autograd_cache:check_node_safe": Uses(("node",)),
        "torch._ops:HigherOrderOperator.cacheable": Uses(("self",), (_MARKED,)),
    },
)
"""Without it, they are traced in each process."""


def cacheable_patch(gm: fx.GraphModule, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inductor options with which ``gm`` comes from the cache in a later process.

    What autocast does is told by the arguments of its switches, of which torch refuses some. What an autograd function
    does is told by its two bodies, which are in the key, if all that these call would be cached outside of it, too.
    """
    called = {node.target for module in _modules(gm) for node in module.graph.nodes if node.op == "call_function"}
    refused = {target for target in called if target in AUTOCAST_SWITCHES or target is _AUTOGRAD_FUNCTION}
    if not refused or not CACHED.is_available():
        return {}
    from torch._inductor import config

    if _AUTOGRAD_FUNCTION in refused and not _tells_all(gm, refused):
        refused.discard(_AUTOGRAD_FUNCTION)
    return {_MARKED: {**options.get(_MARKED, getattr(config, _MARKED)), **_names(refused)}}


_AUTOGRAD_FUNCTION: Any = torch.ops.higher_order.autograd_function_apply


def _names(functions: set[Any]) -> dict[str, str]:
    return {f"{each.__module__}.{each.__name__}": torch.__version__ for each in functions}


def _tells_all(gm: fx.GraphModule, refused: set[Any]) -> bool:
    """Would torch cache each node of the bodies in ``gm``? It looks at those of the outermost graph alone."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_node_safe
    from torch._inductor import config

    with config.patch({_MARKED: {**getattr(config, _MARKED), **_names(refused)}}):
        try:
            for module in _modules(gm):
                for node in module.graph.nodes:
                    check_node_safe(node)
        except BypassAOTAutogradCache:
            return False
    return True


def _modules(gm: fx.GraphModule) -> list[fx.GraphModule]:
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
