"""A graph and the prologues that were split off it, as one graph again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx

from glue_compiler.compat import tracing
from glue_compiler.fx.values import inputs_of

if TYPE_CHECKING:
    from glue_compiler.pipeline.results import Prologue


def join_prologues(rest: fx.GraphModule, prologues: Sequence[Prologue]) -> fx.GraphModule:
    """What runs where ``rest`` is called behind ``prologues``: takes the inputs of the captured graph alone.

    The bodies and attributes are those of ``rest``, and not copied.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    placeholders = inputs_of(rest.graph)
    results = sum(len(prologue.results) for prologue in prologues)
    own, taken = placeholders[: len(placeholders) - results], iter(placeholders[len(placeholders) - results :])
    for node in own:
        mapping[node] = graph.node_copy(node)
        tracing.copy_node_attributes(node, mapping[node])
    for prologue in prologues:
        inner = {
            placeholder: mapping[own[position]]
            for placeholder, position in zip(inputs_of(prologue.graph.graph), prologue.inputs, strict=True)
        }
        returned = graph.graph_copy(prologue.graph.graph, inner)
        assert isinstance(returned, tuple | list)
        for value in returned:
            assert isinstance(value, fx.Node)
            mapping[next(taken)] = value
    graph.output(graph.graph_copy(rest.graph, mapping))
    return fx.GraphModule(rest, graph)
