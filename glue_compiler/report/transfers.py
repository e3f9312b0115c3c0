"""The copies between device and host that a dumped training step holds, in the order in which the host issues work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from glue_compiler.report.graph_text import GraphText, NodeLine

_TRANSFER = re.compile(r"torch\.ops\.glue\.(offload|reload)_(start|wait)[.\w]*\((\w+)")


@dataclass(frozen=True)
class Transfer:
    """``direction``: "offload" or "reload". ``moment``: "start" or "wait". ``operand``: a wait's is its start."""

    direction: str
    moment: str
    operand: str


def transfer_of(node: NodeLine) -> Transfer | None:
    """The start or the wait of a copy that ``node`` is."""
    match = _TRANSFER.match(node.text)
    return Transfer(*match.groups()) if match else None


def step_nodes(graphs: Sequence[GraphText]) -> Iterator[tuple[str, NodeLine]]:
    """(graph, node) of a training step's forward and backward, in the order of issue; inputs come first in each."""
    for graph in graphs:
        if graph.name in ("forward", "backward"):
            yield from ((graph.name, node) for node in graph.nodes if node.name != "return")


@dataclass(frozen=True)
class Bar:
    """Work of one stream, from one place in the order of issue to another; ``node`` is where it starts.

    In a predicted step, ``start`` and ``end`` are milliseconds.
    """

    start: float
    end: float
    label: str
    graph: str
    node: str


@dataclass(frozen=True)
class StreamTimeline:
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
    steps = [(graph, node) for graph, node in step_nodes(graphs) if node.text != "input"]
    bars: dict[str, list[Bar]] = {"offload": [], "reload": []}
    started: dict[tuple[str, str], tuple[int, NodeLine]] = {}
    compute: list[tuple[int, str, str, str]] = []
    for place, (graph, node) in enumerate(steps):
        transfer = transfer_of(node)
        if transfer is None:
            compute.append((place, graph, layer_root(node.layer), node.name))
        elif transfer.moment == "start":
            started[graph, node.name] = (place, node)
        elif (graph, transfer.operand) in started:
            start, begin = started[graph, transfer.operand]
            bars[transfer.direction].append(Bar(start, place, begin.shape or begin.name, graph, begin.name))
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
