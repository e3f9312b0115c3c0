"""What torch's own tools see of glue: its observer and its structured trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import bisector
from glue_compiler.compat.parts import ANY, Feature, Uses

OBSERVER = Feature(
    "part in torch's record of graph transforms",
    {
        "torch.fx.passes.graph_transform_observer:GraphTransformObserver.__init__": Uses(("self", "gm", "passname")),
        "torch.fx.passes.graph_transform_observer:GraphTransformObserver.apply_gm_pass": Uses(("self",)),
    },
)
TRACE = Feature(
    "part in torch's structured trace",
    {"torch._logging:trace_structured": ANY, "torch._logging._internal:trace_log.handlers": ANY},
)


def observed(gm: fx.GraphModule, name: str, run: Callable[[fx.GraphModule], Any]) -> Any:
    """Run one pass inside torch's graph-transform observer, so that torch's own tools know it by name.

    Returns None when torch switched the pass off (``inductor.config.disabled_passes``, the compiler bisector).
    """
    if bisector.disables(bisector.PASSES, name):
        return None
    if not OBSERVER.is_available():
        return run(gm)
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    return GraphTransformObserver(gm, name, subsystem="glue").apply_gm_pass(run)


def trace_is_on() -> bool:
    """Is somebody listening to torch's structured trace?"""
    return TRACE.is_available() and bool(torch._logging._internal.trace_log.handlers)


def trace_artifact(name: str, payload: Callable[[], str], encoding: str = "string") -> None:
    """Write to torch's structured trace (``TORCH_TRACE``, read by tlparse)."""
    if TRACE.is_available():
        torch._logging.trace_structured(
            "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload
        )


def copy_node_attributes(node: fx.Node, copied: fx.Node) -> None:
    """What Dynamo keeps on a node outside of ``meta``, which ``Graph.node_copy`` leaves behind."""
    if hasattr(node, "_dynamo_source"):  # AOTAutograd asks every placeholder for it
        copied._dynamo_source = node._dynamo_source


def set_name(node: fx.Node, name: str) -> None:
    """Call ``node`` by a name that no other node of its graph has: ``Graph.create_node`` changes some names."""
    node.name = name
    node.graph._graph_namespace._rename_object(node, name)


def graph_break_of(gm: fx.GraphModule) -> tuple[str, Any] | None:
    """(reason, user stack) if Dynamo ended this graph at a graph break."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return reason.reason, reason.user_stack


def current_compile_id() -> str | None:
    compile_id = torch._guards.CompileContext.current_compile_id()
    return str(compile_id) if compile_id is not None else None
