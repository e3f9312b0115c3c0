"""``CheckpointPolicy.MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD``: torch 2.11 to 2.15 have them and act on none.

Selective checkpointing writes a policy on the nodes of the joint graph. The partitioner treats these two as none at
all, and may recompute what they mark.
"""

from __future__ import annotations

from typing import Literal

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

Wish = Literal["must", "prefer"]

_KEY = "glue_offload"
_WISHES: dict[object, Wish] = {
    CheckpointPolicy.MUST_CPU_OFFLOAD: "must",
    CheckpointPolicy.PREFER_CPU_OFFLOAD: "prefer",
}


def save_what_is_to_be_offloaded(joint: fx.GraphModule) -> None:
    """Before partitioning: a value to be offloaded is one to be saved, and remembers the wish (:func:`wish_of`)."""
    for node in joint.graph.nodes:
        wish = _WISHES.get(node.meta.get("recompute"))
        if wish is not None:
            node.meta |= {_KEY: wish, "recompute": CheckpointPolicy.MUST_SAVE}


def wish_of(node: fx.Node) -> Wish | None:
    """What a selective policy said of this node of a forward graph."""
    wish: Wish | None = node.meta.get(_KEY)
    return wish


def has_selective_policy(module: fx.GraphModule) -> bool:
    """Is this body of a captured graph a checkpointed region with a ``context_fn``?"""
    return "_checkpoint_context_fn" in module.meta


def torch_offloads() -> bool:
    """Does AOTAutograd offload by itself (``torch._functorch.config``)?"""
    from torch._functorch import config

    return bool(config.enable_activation_offloading)
