"""What was done to the graphs of a process, in memory and in the folder of its dump."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glue_compiler.capture import CaptureEvent
from glue_compiler.pipeline.results import PassReport
from glue_compiler.report.dump_folder import DumpFolder
from glue_compiler.report.graph_report import GraphReport


@dataclass(frozen=True)
class ShownPass:
    """``texts``: the graph around a pass that changed it, by moment: before, after, prologue, and both as a whole."""

    report: PassReport
    texts: Mapping[str, str]


class Session:
    """Numbers the graphs of a process and collects their reports; with a ``folder``, writes them there as they come.

    Args:
        keeps: whether reports are kept; what nobody asks for would only take memory.
    """

    def __init__(self, folder: DumpFolder | None = None, keeps: bool = True) -> None:
        self.folder = folder
        self.keeps = keeps
        self.graphs: list[GraphReport] = []
        self.capture_events: list[CaptureEvent] = []
        self._count = 0
        self._lock = threading.Lock()

    def add_graph(self, report: GraphReport) -> None:
        """Number a graph, from 0."""
        with self._lock:
            report.id = self._count
            self._count += 1
            if self.keeps:
                self.graphs.append(report)

    def show(self, report: GraphReport, passes: Sequence[ShownPass], unchanged: str | None = None) -> None:
        """Write what ``passes`` did; ``unchanged`` is the text of a graph that no pass of its stage has changed."""
        if self.folder is None:
            return
        with self._lock:
            changed = [p for p in report.passes if p.changed]
            for shown in passes:
                number = 1 + next(i for i, p in enumerate(changed) if p is shown.report)
                for moment, text in shown.texts.items():
                    self.folder.write(f"graph_{report.id:03d}/{number:02d}_{shown.report.name}.{moment}.py", text)
            if unchanged is not None:
                self.folder.write(f"graph_{report.id:03d}/00_unchanged.py", unchanged)
            self._write_summary(self.folder)

    def show_plan(self, report: GraphReport, text: str) -> None:
        """What steps have shown about a graph's plan, behind its compile."""
        report.memory_plan = text
        self.show(report, [])

    def add_capture_event(self, event: CaptureEvent) -> None:
        with self._lock:
            if self.keeps:
                self.capture_events.append(event)
            if self.folder is not None:
                self._write_summary(self.folder)

    def summary(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "graphs": [graph.as_json() for graph in self.graphs],
            "capture": [vars(event) for event in self.capture_events],
            "files": self.folder.files if self.folder is not None else [],
        }

    def _write_summary(self, folder: DumpFolder) -> None:
        folder.write_summary(json.dumps(self.summary(), indent=1))


_sessions: dict[str, Session] = {}
_sessions_lock = threading.Lock()


def session_for(folder: str) -> Session:
    """The process's session for a dump folder. In a distributed job each rank has a folder of its own inside."""
    rank = _rank()
    path = os.path.abspath(folder if rank is None else os.path.join(folder, f"rank_{rank}"))
    with _sessions_lock:
        if path not in _sessions:
            _sessions[path] = Session(DumpFolder(Path(path)))
        return _sessions[path]


def _rank() -> str | None:
    # A launcher may tell ranks by the environment, or by arguments that the program hands to torch.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    return os.environ.get("RANK")


def _begin_again() -> None:
    """A forked process writes to a folder of its own; its parent goes on with the one that it has."""
    global _sessions_lock
    _sessions.clear()
    _sessions_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)
