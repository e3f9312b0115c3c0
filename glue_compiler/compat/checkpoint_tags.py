"""What AOTAutograd writes on the nodes of checkpointed regions (the same keys in torch 2.11 to 2.15)."""

from __future__ import annotations

from torch import fx


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
