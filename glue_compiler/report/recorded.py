"""Reads a dump folder back: ``summary.json``, and the graph files that belong to each pass."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glue_compiler.report.alignment import AlignedGraph, align_graphs
from glue_compiler.report.dump_folder import PROCESSES
from glue_compiler.report.graph_text import DumpError, GraphText, read_graphs

MOMENTS = ("before", "after", "prologue", "whole")


@dataclass(frozen=True)
class RecordedPass:
    """What one pass did to one graph.

    Attributes:
        entry: as ``summary.json`` has it.
        files: those of its graphs, by moment, of ``MOMENTS``.
    """

    entry: Mapping[str, Any]
    files: Mapping[str, Path]

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    @property
    def changed(self) -> bool:
        return bool(self.entry["changed"])

    def graphs(self, moment: str) -> tuple[GraphText, ...]:
        """The graph and its bodies at ``moment``; empty if the pass wrote none."""
        return _read(self.files[moment]) if moment in self.files else ()

    def aligned(self) -> tuple[AlignedGraph, ...]:
        """Before and after, side by side; empty if the pass changed nothing."""
        return align_graphs(self.graphs("before"), self.graphs("after")) if self.changed else ()


@dataclass(frozen=True)
class RecordedGraph:
    """One compiled graph: its ``entry`` in ``summary.json``; ``unchanged`` is its file if no pass changed it."""

    entry: Mapping[str, Any]
    passes: tuple[RecordedPass, ...]
    unchanged: Path | None

    @property
    def id(self) -> int:
        return int(self.entry["id"])

    def final(self) -> tuple[GraphText, ...]:
        """The graph that the captured stage handed on."""
        if self.unchanged is not None:
            return _read(self.unchanged)
        changed = [p for p in self.passes if p.changed and p.entry["stage"] == "captured"]
        return changed[-1].graphs("after") if changed else ()


@dataclass(frozen=True)
class Recorded:
    """A whole dump."""

    folder: Path
    torch: str
    graphs: tuple[RecordedGraph, ...]
    capture: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...] = ()
    """What this dump does not show."""

    def graph(self, number: int) -> RecordedGraph:
        """
        Raises:
            DumpError: there is no graph of this number.
        """
        for graph in self.graphs:
            if graph.id == number:
                return graph
        raise DumpError(f"{self.folder} has no graph {number}; graphs: {', '.join(str(g.id) for g in self.graphs)}")


def read_folder(folder: Path) -> Recorded:
    """
    Raises:
        DumpError: ``folder`` has no ``summary.json``, or one that is not glue's.
    """
    summary = folder / "summary.json"
    others = sorted(path.parent.name for kind in ("rank_*", PROCESSES) for path in folder.glob(f"{kind}/summary.json"))
    if not summary.is_file():
        hint = f"; it holds the dumps of other processes, such as {folder / others[0]}" if others else ""
        raise DumpError(f"{folder} has no summary.json{hint}. GLUE_DUMP=folder makes a dump.")
    try:
        content = json.loads(summary.read_text(encoding="utf-8"))
        return Recorded(
            folder,
            content["torch"],
            tuple(_graph(folder, graph) for graph in content["graphs"]),
            tuple(content["capture"]),
            tuple(_warnings(folder, content["files"], others)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DumpError(f"{summary} is not a summary of glue: {type(error).__name__}: {error}") from error


def _warnings(folder: Path, files: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    if missing := [name for name in files if not (folder / name).is_file()]:
        yield f"{len(missing)} of the dump's {len(files)} files are not there, such as {folder / missing[0]}"
    if others:
        yield f"{len(others)} other processes wrote dumps of their own, such as {folder / others[0]}"


def _graph(folder: Path, graph: Mapping[str, Any]) -> RecordedGraph:
    own = folder / f"graph_{graph['id']:03d}"
    passes, number = [], 0
    for p in graph["passes"]:
        number += p["changed"]
        paths = {moment: own / f"{number:02d}_{p['name']}.{moment}.py" for moment in MOMENTS}
        files = {moment: path for moment, path in paths.items() if p["changed"] and path.is_file()}
        passes.append(RecordedPass(p, files))
    unchanged = own / "00_unchanged.py"
    return RecordedGraph(graph, tuple(passes), unchanged if unchanged.is_file() else None)


def _read(path: Path) -> tuple[GraphText, ...]:
    try:
        return _read_text(path.read_text(encoding="utf-8"))
    except (DumpError, OSError, UnicodeDecodeError) as error:
        raise DumpError(f"{path}: {error}") from error


# The graph after one pass is the graph before the next.
@functools.lru_cache(maxsize=4)
def _read_text(text: str) -> tuple[GraphText, ...]:
    return read_graphs(text)
