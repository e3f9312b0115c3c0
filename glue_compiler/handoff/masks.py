"""What is known of masks goes from the compiled graph that returns one to those that are compiled for it.

The graph that makes a mask is read when it is compiled, and what it returns is remembered with each call
(``ops/known_masks.py``). A graph that is handed the mask is compiled for what is known of it then. A guard asks in each
later call, so that another mask, or one that was written since, gets code of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from glue_compiler.compat import branch_guards, graph_inputs
from glue_compiler.ops.known_masks import KNOWN, MaskKind, kind_of, may_be_mask, remember

Sources = Mapping[fx.Node, Any]
"""Inputs of a graph that may be masks → where Dynamo finds them in a call."""


def look_at_masks(gm: fx.GraphModule) -> Sources:
    """Note in the ``meta`` of inputs that may be masks what is known of those of the call that Dynamo compiles."""
    sources: dict[fx.Node, Any] = {}
    # A guard asks before the first piece of a graph runs, which may write an input of a later one.
    if branch_guards.BRANCHES.is_available() and graph_inputs.all_have_sources(gm):
        for node in gm.graph.find_nodes(op="placeholder"):
            found = branch_guards.input_of(node)
            if found is not None and may_be_mask(found[1]):
                sources[node], node.meta[KNOWN] = found[0], kind_of(found[1])
    return sources


def guard_masks(sources: Sources, relied_on: Iterable[fx.Node]) -> None:
    """The code that is compiled now holds for calls of whose masks the same is known."""
    for node in relied_on:
        kind = node.meta[KNOWN]
        text = f"glue: of the mask {sources[node].name} is known {kind}"
        branch_guards.install_guard(sources[node], functools.partial(_is_known_as, kind), text)


def remember_masks(call: Callable[..., Any], kinds: Mapping[int, MaskKind]) -> Callable[..., Any]:
    """``call``, whose results at these positions are remembered as masks; itself if there are none."""
    if not kinds:
        return call

    def run(*inputs: Any) -> Any:
        results = call(*inputs)
        for position, kind in kinds.items():
            remember(results[position], kind)
        return results

    return run


def _is_known_as(kind: MaskKind | None, mask: Any) -> bool:
    return kind_of(mask) == kind
