"""Graphs that AOTAutograd does not cache, though its key tells all that they do: each process would trace them anew."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.operators import is_of_others
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
_AUTOGRAD_FUNCTION: Any = torch.ops.higher_order.autograd_function_apply


def cacheable_patch(gm: fx.GraphModule, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inductor options with which ``gm`` comes from the cache in a later process.

    What an autograd function does is told by its two bodies, which are in the key, and what autocast does by the
    arguments of its switches and :func:`_modes`, if all operators are known: those of others do in autograd and under
    autocast what Python has registered.
    """
    called = {node.target for module in _modules(gm) for node in module.graph.nodes if node.op == "call_function"}
    refused = {target for target in called if target in AUTOCAST_SWITCHES or target is _AUTOGRAD_FUNCTION}
    if not refused or not CACHED.is_available() or not _tells_all(gm, called, refused):
        return {}
    from torch._inductor import config

    return {_MARKED: {**options.get(_MARKED, getattr(config, _MARKED)), **_names(refused)}}


def _names(functions: set[Any]) -> dict[str, str]:
    """The functions as the option names them; the values are in the key."""
    return {f"{each.__module__}.{each.__name__}": _modes() for each in functions}


def _modes() -> str:
    """What operators do by a mode of the process or the thread."""
    devices = torch._C._autocast_supported_devices()
    autocast = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices]
    packages = [getattr(sys.modules.get(name), "__version__", None) for name in ("bitsandbytes",)]
    return repr((torch.__version__, torch.get_default_dtype(), autocast, packages))


def _tells_all(gm: fx.GraphModule, called: set[Any], refused: set[Any]) -> bool:
    """Would torch cache each node of the bodies in ``gm``? It looks at those of the outermost graph alone."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_node_safe
    from torch._inductor import config

    if any(map(is_of_others, called)):
        return False
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
