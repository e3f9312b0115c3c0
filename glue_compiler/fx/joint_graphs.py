"""AOTAutograd's joint graph, before it is partitioned: what is in it, and marks for the partitioner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from glue_compiler.compat import checkpoint_tags, offload_policies

# Their results depend on their operands alone; operators of others may hide what they do.
_KNOWN_NAMESPACES = ("aten", "prims", "glue")
_UNREPEATABLE = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)


def results_of(joint: fx.GraphModule, num_outputs: int) -> tuple[list[fx.Node], list[fx.Node]]:
    """What the forward returns, and what the backward returns."""
    leaves = tree_leaves(joint.graph.output_node().args)
    nodes = [
        [leaf for leaf in part if isinstance(leaf, fx.Node)] for part in (leaves[:num_outputs], leaves[num_outputs:])
    ]
    return nodes[0], nodes[1]


def depends_on_gradients(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, in the order of the graph, that can be computed in backward alone."""
    found: set[fx.Node] = set()
    for node in nodes:
        is_gradient = node.op == "placeholder" and "tangents" in str(node.target)
        if is_gradient or checkpoint_tags.is_backward(node) or any(read in found for read in node.all_input_nodes):
            found.add(node)
    return found


def may_recompute(node: fx.Node) -> bool:
    """Does it give the same again? Of operators that are not known, only those that the user has checkpointed."""
    if checkpoint_tags.is_marked_to_recompute(node):
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function" and not isinstance(target, torch._ops.OperatorBase)  # getitem, numbers
    if target.namespace not in _KNOWN_NAMESPACES or target._schema.is_mutable:
        return False
    return not any(tag in target.tags for tag in _UNREPEATABLE)


def mark(saved: Iterable[fx.Node], moved: Iterable[fx.Node], recomputed: Iterable[fx.Node]) -> None:
    """Tell the partitioner what to save and what to recompute, as a selective checkpoint would."""
    moving = set(moved)
    for node in (*saved, *moving):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        offload_policies.mark_planned(node, moves=node in moving)
    for node in recomputed:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def unmark(nodes: Iterable[fx.Node], segments: Mapping[fx.Node, int]) -> None:
    """Take the user's marks away, and number the segments instead of checkpointed regions. What a policy moves to the
    host is remembered."""
    for node in nodes:
        offload_policies.remember_wish(node)
        node.meta.pop("recompute", None)
        node.meta.pop("ac_graph_id", None)
        if node in segments:
            node.meta["ac_graph_id"] = segments[node]
