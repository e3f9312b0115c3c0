"""What is known of masks goes from the compiled graph that returns one to those that are compiled for it.

The graph that makes a mask is read when it is compiled, and what it returns is remembered with each call
(``ops/known_masks.py``). A graph that is handed the mask is compiled for what is known of it then. A guard asks in each
later call, so that another mask, or one that was written since, gets code of its own.
So it is with results that are zeros for tokens that a mask hides (``seen_tokens.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import branch_guards, graph_inputs
from glue_compiler.fx.values import inputs_of
from glue_compiler.handoff.seen_tokens import add_seen
from glue_compiler.ops.known_masks import (
    KNOWN,
    PADDING,
    SEEN,
    MaskKind,
    Padding,
    kind_of,
    knows_padding,
    mask_of,
    may_be_mask,
    may_be_tokens,
    padding_of,
    remember,
)

Sources = Mapping[fx.Node, Any]
"""Inputs of a graph that may be masks, or tokens → where Dynamo finds them in a call."""


def look_at_masks(gm: fx.GraphModule, *, tokens: bool = False) -> Sources:
    """Note in the ``meta`` of inputs that may be masks what is known of those of the call that Dynamo compiles.

    Inputs behind all others say which tokens are no padding, where that is known.

    Args:
        tokens: and of inputs that may be tokens.
    """
    sources: dict[fx.Node, Any] = {}
    # A guard asks before the first piece of a graph runs, which may write an input of a later one.
    if not branch_guards.BRANCHES.is_available() or not graph_inputs.all_have_sources(gm):
        return sources
    inputs = {at: branch_guards.input_of(node) for at, node in enumerate(inputs_of(gm.graph))}
    asked = {at: found for at, found in inputs.items() if found is not None and _is_asked(found[1], tokens)}
    seen = add_seen(gm, [at for at, (_, tensor) in asked.items() if knows_padding(tensor)])
    paddings: dict[Padding | None, int] = {}
    nodes = inputs_of(gm.graph)
    for at, (source, tensor) in asked.items():
        node = nodes[at]
        sources[node], node.meta[SEEN] = source, seen.get(at)
        if at in seen:
            node.meta[PADDING] = paddings.setdefault(padding_of(tensor), len(paddings))
        if may_be_mask(tensor):
            node.meta[KNOWN] = kind_of(tensor)
    return sources


def _is_asked(tensor: torch.Tensor, tokens: bool) -> bool:
    return may_be_mask(tensor) or (tokens and may_be_tokens(tensor))


def guard_masks(sources: Sources, relied_on: Iterable[fx.Node], under_one_mask: Sequence[fx.Node]) -> None:
    """The code that is compiled now holds for calls of whose masks, and tokens, the same is known.

    Args:
        under_one_mask: one mask, or tokens of one, and what may not be zeros for what another one hides.
    """
    known = [sources[node] for node in under_one_mask if node in sources]
    if len(known) > 1:
        branch_guards.install_guard_of_several(known, _are_under_one_mask, "glue: these are tokens under one mask")
    for node in relied_on:
        if KNOWN in node.meta:
            kind = node.meta[KNOWN]
            check, text = functools.partial(_is_known_as, kind), f"of the mask {sources[node].name} is known {kind}"
        else:
            is_known = node.meta[SEEN] is not None
            check = functools.partial(_has_mask, is_known)
            text = f"of the tokens {sources[node].name} a mask is {'' if is_known else 'not '}known"
        branch_guards.install_guard(sources[node], check, f"glue: {text}")


def remember_masks(call: Callable[..., Any], kinds: Mapping[int, tuple[MaskKind, int]]) -> Callable[..., Any]:
    """``call``, whose results at these positions are remembered as masks; itself if there are none."""
    if not kinds:
        return call

    def run(*inputs: Any) -> Any:
        results, paddings = call(*inputs), [Padding() for _ in kinds]
        for position, (kind, number) in kinds.items():
            remember(results[position], kind, paddings[number])
        return results

    return run


def _has_mask(is_known: bool, tokens: Any) -> bool:
    return (mask_of(tokens) is not None) == is_known


def _are_under_one_mask(source: Any, *others: Any) -> bool:
    padding = padding_of(source)
    return all(padding_of(each) in (None, padding) for each in others)


def _is_known_as(kind: MaskKind | None, mask: Any) -> bool:
    return kind_of(mask) == kind
