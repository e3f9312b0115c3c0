"""The copies between device and host that a dumped training step holds, in the order in which the host issues work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from glue_compiler.report.graph_text import GraphText, NodeLine

_TRANSFER = re.compile(r"torch\.ops\.glue\.(offload|reload)_(start|wait)[.\w]*\((\w+)")


class Bar(NamedTuple):
    """Work of one stream, from one place in the order of issue to another; ``node`` is where it starts."""

    start: int
    end: int
    label: str
    graph: str
    node: str


class StreamTimeline(NamedTuple):
    """One training step.

    Attributes:
        compute: one bar for each run of operators of one layer.
        to_host, from_host: one bar for each copy, from its start to the wait for it.
        length: operators of the step: the last place.
        backward: the place where backward begins.
    """

    compute: tuple[Bar, ...]
    to_host: tuple[Bar, ...]
    from_host: tuple[Bar, ...]
    length: int
    backward: int


def find_transfers(graphs: Sequence[GraphText]) -> StreamTimeline | None:
    """The timeline of a step's forward and backward; None if nothing is copied."""
    steps = [
        (graph.name, node)
        for graph in graphs
        if graph.name in ("forward", "backward")
        for node in graph.nodes
        if node.name != "return" and node.text != "input"
    ]
    bars: dict[str, list[Bar]] = {"offload": [], "reload": []}
    started: dict[tuple[str, str], tuple[int, NodeLine]] = {}
    compute: list[tuple[int, str, str, str]] = []
    for place, (graph, node) in enumerate(steps):
        match = _TRANSFER.match(node.text)
        if match is None:
            compute.append((place, graph, layer_root(node.layer), node.name))
            continue
        direction, moment, operand = match.groups()
        if moment == "start":
            started[graph, node.name] = (place, node)
        elif (graph, operand) in started:  # a wait's operand is its start
            start, begin = started[graph, operand]
            bars[direction].append(Bar(start, place, begin.shape or begin.name, graph, begin.name))
    if not bars["offload"] and not bars["reload"]:
        return None
    backward = next((place for place, (graph, _) in enumerate(steps) if graph == "backward"), len(steps))
    return StreamTimeline(tuple(_layers(compute)), tuple(bars["offload"]), tuple(bars["reload"]), len(steps), backward)


def layer_root(path: str) -> str:
    """The layer that a module belongs to: its path up to the first number, ``model.layers.3`` of ``...3.mlp.up``."""
    parts = path.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return path if numbered is None else ".".join(parts[: numbered + 1])


def _layers(compute: Iterable[tuple[int, str, str, str]]) -> Iterable[Bar]:
    for (graph, layer), run in groupby(compute, key=lambda step: (step[1], step[2])):
        places = list(run)
        yield Bar(places[0][0], places[-1][0] + 1, layer or "other", graph, places[0][3])
