"""What AOTAutograd writes on the nodes of checkpointed regions (the same keys in torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import fx
from torch._higher_order_ops import wrap
from torch.utils.checkpoint import CheckpointPolicy

_EXPLICIT: dict[object, Literal["save", "recompute"]] = {
    CheckpointPolicy.MUST_SAVE: "save",
    CheckpointPolicy.MUST_CPU_OFFLOAD: "save",
    CheckpointPolicy.MUST_RECOMPUTE: "recompute",
}


_ARE_LEFT_OUT = hasattr(wrap.TagActivationCheckpoint, "tag_nodes")
"""Up to 2.12 what lies in a body of a checkpoint's body has no tags."""


def reach_autograd_functions(gm: fx.GraphModule) -> None:
    """Have what the forwards of autograd functions in checkpoints compute tagged as all else that lies in these.

    Without tags the partitioner keeps their results from the forward on, such as each product with weights of 4 bits.
    A node without metadata of its own is traced with that of the call that it runs in. Policies are left alone: they
    are asked for each operator, wherever it lies.
    """
    if not _ARE_LEFT_OUT:
        return
    for body in _bodies(gm, torch.ops.higher_order.tag_activation_checkpoint):
        if "_checkpoint_context_fn" not in body.meta:
            for forward in _bodies(body, torch.ops.higher_order.autograd_function_apply):
                for node in forward.graph.nodes:
                    node.meta.clear()


def _bodies(gm: fx.GraphModule, operator: Any) -> Iterator[fx.GraphModule]:
    """What calls of ``operator``, in ``gm`` and its bodies, run first."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=operator):
                body = node.args[0]
                if isinstance(body, fx.Node) and isinstance(made := getattr(module, str(body.target)), fx.GraphModule):
                    yield made


def explicit_policy(node: fx.Node) -> Literal["save", "recompute"] | None:
    """What a selective checkpoint insists on for this node of a joint graph; plain checkpoints only prefer."""
    return _EXPLICIT.get(node.meta.get("recompute"))


def is_marked_to_recompute(node: fx.Node) -> bool:
    """Is this node of a joint graph one that a checkpoint computes again?"""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def forget_preferences(joint: fx.Graph) -> None:
    """What plain checkpoints, and policies that only prefer, would compute again, a partitioner decides as outside."""
    for node in joint.nodes:
        if node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE:
            del node.meta["recompute"]


def is_backward(node: fx.Node) -> bool:
    """Has the program said that this node of a joint graph belongs to backward?"""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def region_of(node: fx.Node) -> int | None:
    """The checkpointed region, in the order of the forward, that computes or recomputes this node; None outside."""
    region = node.meta.get("ac_graph_id")
    return region if isinstance(region, int) else None


def is_recomputed(node: fx.Node) -> bool:
    """Is this node of a backward graph a repetition of the forward's?"""
    return node.meta.get("partitioner_tag") == "is_forward"


def is_graph_input(node: fx.Node) -> bool:
    """A value that the caller of the compiled function passed in: a parameter, a batch, a buffer."""
    return node.op == "placeholder"
