"""Which layer of the user's model a node comes from."""

from __future__ import annotations

import re

from torch import fx


def layer_of(node: fx.Node) -> str:
    """The path of the innermost module that was running, such as ``model.layers.3.mlp``; ``""`` where none is known.

    Dynamo and AOTAutograd (2.11 to 2.15) keep ``nn_module_stack``, key → (path as a Python expression, class);
    AOTAutograd keeps that of a backward node's forward as ``fwd_nn_module_stack``.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    # "L['self'].layers.3.mlp" and "L['self'].__dict__['_modules']['layers']._modules['3'].mlp" are the same layer.
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", str(list(stack.values())[-1][0]))
    parts = [part for part in path.split(".") if part not in ("__dict__", "_modules")]
    return ".".join(parts[2:] if parts[0] == "L" else parts)
