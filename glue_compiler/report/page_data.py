"""What the page of ``glue view`` shows, as plain data: each node and each text once, everything else by number."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from glue_compiler.report.alignment import AlignedGraph
from glue_compiler.report.graph_text import GraphText, NodeLine
from glue_compiler.report.recorded import Recorded, RecordedGraph, RecordedPass
from glue_compiler.report.transfers import find_transfers, layer_root

KINDS = ("same", "changed", "removed", "added", "moved")
NOTHING = -1


def page_data(recorded: Recorded) -> dict[str, Any]:
    """A JSON object.

    ``strings``: texts. ``nodes``: ``[name, text, shape, source, code, layer]``, places in ``strings``. A diff is a list
    of ``[name of the graph or body, [kind, node before, node after, kind, ...]]``: places in ``kinds`` and ``nodes``,
    -1 for none. A plain graph is ``[name, [node, ...]]``.
    """
    tables = _Tables()
    graphs = [_graph(graph, tables) for graph in recorded.graphs]
    return {
        "torch": recorded.torch,
        "folder": recorded.folder.resolve().name,
        "kinds": KINDS,
        "graphs": graphs,
        "capture": recorded.capture,
        "layers": _in_order({layer_root(layer) for layer in tables.layers} - {""}),
        "nodes": list(tables.nodes),
        "strings": list(tables.strings),
    }


class _Tables:
    def __init__(self) -> None:
        self.strings: dict[str, int] = {}
        self.nodes: dict[tuple[int, ...], int] = {}
        self.layers: set[str] = set()
        self._numbers: dict[NodeLine, int] = {}

    def node(self, node: NodeLine | None) -> int:
        if node is None:
            return NOTHING
        if node not in self._numbers:
            self.layers.add(node.layer)
            shown = dataclasses.replace(node, source=short_source(node.source))
            record = tuple(self.strings.setdefault(text, len(self.strings)) for text in astuple(shown))
            self._numbers[node] = self.nodes.setdefault(record, len(self.nodes))
        return self._numbers[node]

    def diff(self, graphs: Iterable[AlignedGraph]) -> list[Any]:
        return [
            [
                graph.name,
                [part for r in graph.rows for part in (KINDS.index(r.kind), self.node(r.before), self.node(r.after))],
            ]
            for graph in graphs
        ]

    def plain(self, graphs: Iterable[GraphText]) -> list[Any]:
        return [[graph.name, [self.node(node) for node in graph.nodes]] for graph in graphs]


def _graph(graph: RecordedGraph, tables: _Tables) -> dict[str, Any]:
    broken = graph.entry["graph_break"]
    return {
        **graph.entry,
        "graph_break": broken and _with_short_source(broken),
        "host_syncs": [_with_short_source(sync) for sync in graph.entry["host_syncs"]],
        "final": tables.plain(graph.final()),
        "passes": [_pass(p, tables) for p in graph.passes],
    }


def _pass(p: RecordedPass, tables: _Tables) -> dict[str, Any]:
    """Bars of a timeline are ``[start, end, label, graph, node]``."""
    after = p.graphs("after")
    timeline = find_transfers(after)
    return {
        **p.entry,
        "skips": [_with_short_source(skip) for skip in p.entry["skips"]],
        "nodes": [_operators(p.graphs("before")), _operators(after)] if p.changed else None,
        "diff": tables.diff(p.aligned()),
        "prologue": tables.plain(p.graphs("prologue")),
        "timeline": timeline and timeline._asdict(),
    }


def _operators(graphs: Sequence[GraphText]) -> int:
    """Operator calls: no inputs, outputs, attributes, nor other names of an input."""
    texts = [node.text for graph in graphs for node in graph.nodes if node.name != "return"]
    return sum(not text.startswith("self.") and not text.isidentifier() for text in texts)


def short_source(source: str) -> str:
    """A path of a package from the package on, and one below the current folder from there on."""
    packaged = re.sub(r"^.*?/site-packages/", "", source)
    return packaged.removeprefix(f"{os.getcwd()}{os.sep}")


def _with_short_source(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry, "source": short_source(entry["source"])}


def _in_order(layers: Iterable[str]) -> list[str]:
    """``layers.2`` before ``layers.10``."""

    def key(path: str) -> list[tuple[bool, int, str]]:
        return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in path.split(".")]

    return sorted(layers, key=key)
