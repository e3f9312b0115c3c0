"""What AOTAutograd writes on the nodes of checkpointed regions (the same keys in torch 2.11 to 2.15)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx
from torch._higher_order_ops import wrap
from torch.utils.checkpoint import CheckpointPolicy

from glue_compiler.compat.operators import AUTOGRAD_FUNCTION, is_of_others
from glue_compiler.compat.thread_flag import ThreadFlag

_TAGGING: Any = getattr(wrap, "TagActivationCheckpoint", None)
LEAVES_FUNCTIONS_OUT = hasattr(_TAGGING, "tag_nodes")
"""Does torch tag no more than a checkpoint's own operators?"""
_LOOKS = "remat_using_tags_for_fwd_loss_bwd_graph"
_tags_functions = ThreadFlag()


@contextlib.contextmanager
def autograd_functions_tagged() -> Iterator[None]:
    """In here, what forwards of autograd functions in a checkpoint compute is tagged as all else that lies in it.

    Up to torch 2.12 it has no tags, so that the partitioner keeps its results from the forward on, such as each product
    with weights of 4 bits. Policies are left alone: they are asked for each operator, wherever it lies. So are
    operators of others.
    """
    _install()
    with _tags_functions.on():
        yield


@functools.cache
def _install() -> None:
    if not LEAVES_FUNCTIONS_OUT:
        return
    original = _TAGGING.tag_nodes

    def tag_nodes(gmod: fx.GraphModule, is_sac: bool) -> fx.GraphModule:
        tagged: fx.GraphModule = original(gmod, is_sac)
        if not is_sac and _tags_functions.is_on:
            _tag_functions(tagged)
        return tagged

    _TAGGING.tag_nodes = staticmethod(tag_nodes)


def kept_in_forward(modules: Iterable[fx.GraphModule]) -> contextlib.AbstractContextManager[None]:
    """In here, checkpoints are of no consequence in a graph that is no training step, as that of a frozen layer.

    From 2.13 on torch looks for backward's part in it, which only a traced ``torch.autograd.grad`` has, and refuses
    random operators, attention among them, before it sees that there is none. ``modules``: the graph and its bodies.
    """
    from torch._functorch import config

    if not hasattr(config, _LOOKS):
        return contextlib.nullcontext()
    has_backward = any(
        node.meta.get("autograd_backward") or "phase" in node.meta.get("custom", {})
        for module in modules
        for node in module.graph.nodes
    )
    if has_backward:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[None] = config.patch({_LOOKS: False})
    return found


def _tag_functions(tagged: fx.GraphModule) -> None:
    for module in tagged.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=AUTOGRAD_FUNCTION):
                forward = getattr(module, str(node.args[0].target))
                tags = {key: node.meta[key] for key in ("recompute", "ac_graph_id") if key in node.meta}
                for inner in forward.graph.nodes:
                    if not is_of_others(inner.target):  # one may draw random numbers, which nobody would draw again
                        inner.meta.update(tags)


def forget_preferences(joint: fx.Graph) -> None:
    """What plain checkpoints, and policies that only prefer, would compute again, a partitioner decides as outside."""
    for node in joint.nodes:
        if node.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE:
            del node.meta["recompute"]


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
