"""Which tokens are padding goes from graph to graph, as what is known of masks does.

A graph that is given a mask with padding, or what is zeros for padding, is given which tokens that are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import graph_inputs
from glue_compiler.fx.copying import copy_graph
from glue_compiler.fx.values import inputs_of, value_of
from glue_compiler.ops.known_masks import SEEN, may_be_mask, remember_tokens, seen_of
from glue_compiler.pipeline.results import Prologue


def add_seen(gm: fx.GraphModule, known: Sequence[int]) -> dict[int, fx.Node]:
    """Position of an input that knows padding → the input that says which tokens are none."""
    if not known:
        return {}
    # In a copy, because Dynamo goes on reading its own graph's inputs after the backend has returned.
    gm.graph, _ = copy_graph(gm.graph)
    inputs, found = inputs_of(gm.graph), dict[int, fx.Node]()
    last = inputs[-1]
    for at in known:
        value = value_of(inputs[at])
        sizes = (value.shape[0], value.shape[-1]) if may_be_mask(value) else value.shape[:2]
        with gm.graph.inserting_after(last):
            last = found[at] = gm.graph.placeholder(f"seen_tokens_{at}")
        with value.fake_mode:
            last.meta["example_value"] = torch.empty(sizes, dtype=torch.bool, device=value.device)
        graph_inputs.set_sourceless(last)
    return found


@dataclass(frozen=True)
class Supplied:
    """Inputs of a graph that glue gives it: which tokens are no padding, by what Dynamo gives it at ``places``.

    Attributes:
        examples: of these inputs. moved: where they stood, behind all others, when the graph had more of them → where
            they stand.
    """

    places: tuple[int, ...] = ()
    examples: tuple[Any, ...] = ()
    moved: Mapping[int, int] = field(default_factory=dict)

    def to(self, call: Callable[..., Any]) -> Callable[..., Any]:
        if not self.places:
            return call
        return lambda *given: call(*given, *[seen_of(given[at]) for at in self.places])

    def of(self, prologue: Prologue) -> Prologue:
        """Of the graph, whose inputs it reads."""
        return replace(prologue, inputs=tuple(self.moved.get(at, at) for at in prologue.inputs))


def keep_needed(
    gm: fx.GraphModule, sources: Collection[fx.Node], prologues: Sequence[Prologue], number: int
) -> Supplied:
    """The inputs behind the first ``number`` that :func:`add_seen` has added; those that nothing reads go."""
    added = [node for node in sources if node.meta[SEEN] is not None]
    read = {at for prologue in prologues for at in prologue.inputs}
    kept = [node for at, node in enumerate(added, number) if node.meta[SEEN].users or at in read]
    moved, behind = dict[int, int](), inputs_of(gm.graph)[number:]
    for at, (node, placeholder) in enumerate(zip(added, behind, strict=False)):
        if node in kept:
            moved[number + at] = number + len(moved)
        else:
            gm.graph.erase_node(placeholder)
    if len(kept) < len(added):
        gm.recompile()
    places = tuple(inputs_of(node.graph).index(node) for node in kept)
    examples = tuple(graph_inputs.example_input(value_of(node.meta[SEEN])) for node in kept)
    return Supplied(places, examples, moved)


def remember_seen(call: Callable[..., Any], sources: Mapping[int, int]) -> Callable[..., Any]:
    """``call``, whose results at these positions are zeros for tokens that the mask of the input there hides."""
    if not sources:
        return call

    def run(*inputs: Any) -> Any:
        results = call(*inputs)
        for position, source in sources.items():
            remember_tokens(results[position], inputs[source])
        return results

    return run
