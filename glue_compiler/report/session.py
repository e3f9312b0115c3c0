"""What was done to the graphs of a process, and the folder that it is written to."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.capture import CaptureEvent
from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.values import source_line
from glue_compiler.pipeline import PassReport
from glue_compiler.report.dump import render_graph


@dataclass(frozen=True)
class HostSync:
    """A node that waits for the device. ``source`` is the user's line; in a prologue it runs ``once_per_batch``."""

    node: str
    target: str
    source: str
    once_per_batch: bool = False


@dataclass
class GraphReport:
    """One compiled graph. Node counts are operator calls, those of bodies included."""

    nodes_before: int
    nodes_after: int = 0
    passes: list[PassReport] = field(default_factory=list)
    graph_break: tuple[str, str] | None = None
    """(reason, user's line) of the graph break that this graph ends at."""
    compile_id: str | None = None
    host_syncs: list[HostSync] = field(default_factory=list)
    id: int = 0

    @classmethod
    def of_captured(cls, gm: fx.GraphModule) -> GraphReport:
        report = cls(bodies.count_nodes(gm), compile_id=compat.current_compile_id())
        if found := compat.graph_break_of(gm):
            reason, stack = found
            last = stack[-1] if stack else None
            report.graph_break = (reason, f"{last.filename}:{last.lineno} in {last.name}" if last else "")
        return report

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "compile_id": self.compile_id,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "graph_break": dict(zip(("reason", "source"), self.graph_break, strict=True)) if self.graph_break else None,
            "host_syncs": [vars(sync) for sync in self.host_syncs],
            "passes": [_pass_as_json(p) for p in self.passes],
        }

    def add_passes(self, passes: list[PassReport]) -> None:
        """What ran after the graph was handed on."""
        self.passes += passes
        self._trace(passes)

    def trace(self) -> None:
        """Write to torch's structured trace."""
        self._trace(self.passes)

    def _trace(self, passes: list[PassReport]) -> None:
        compat.trace_artifact("glue_passes", lambda: json.dumps(self.as_json()), encoding="json")
        for p in passes:
            for moment, text in p.texts().items():
                compat.trace_artifact(f"glue_{p.name}_{moment}", text.__str__)


def _pass_as_json(report: PassReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "stage": report.stage.value,
        "numerics": report.numerics.value,
        "changed": report.changed,
        "counts": dict(report.counts),
        "rewrites": [{"number": r.number, "what": r.what} for r in report.rewrites],
        "skips": [{"reason": s.reason, "node": s.node, "source": s.source} for s in report.skips],
        "ms": round(report.milliseconds, 3),
        "error": report.error,
    }


def host_syncs_in(gm: fx.GraphModule) -> list[HostSync]:
    """The nodes of ``gm`` and its bodies that read a value back from the device."""
    analysis = EffectAnalysis.for_graph(gm)
    return [
        HostSync(
            node.name,
            str(node.target if node.op == "call_method" else getattr(node.target, "__name__", node.target)),
            source_line(node),
        )
        for module in bodies.graph_modules(gm)
        for node in module.graph.nodes
        if not bodies.is_higher_order(node) and analysis.of(module, node).syncs
    ]


class Session:
    """Collects reports; with a ``folder``, writes the graphs and ``summary.json`` there as they come."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder) if folder is not None else None
        self.graphs: list[GraphReport] = []
        self.capture_events: list[CaptureEvent] = []
        self._lock = threading.Lock()
        self._files: list[str] = []
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_earlier_dump(self.folder)

    def add_graph(self, report: GraphReport, gm: fx.GraphModule) -> None:
        """``gm`` is the graph after all passes."""
        report.host_syncs = host_syncs_in(gm)
        for p in report.passes:
            if p.prologue is not None:
                moved = host_syncs_in(p.prologue.graph)
                report.host_syncs += [dataclasses.replace(sync, once_per_batch=True) for sync in moved]
        with self._lock:
            report.id = len(self.graphs)
            self.graphs.append(report)
            if self.folder is not None:
                self._write_graphs(self.folder, report, gm)
                self._write_summary(self.folder)

    def update_graph(self, report: GraphReport, added: list[PassReport]) -> None:
        """``report``, which was added before, has the passes ``added`` too."""
        with self._lock:
            if self.folder is not None:
                self._write_passes(self.folder, report, added)
                self._write_summary(self.folder)

    def add_capture_event(self, event: CaptureEvent) -> None:
        with self._lock:
            self.capture_events.append(event)
            if self.folder is not None:
                self._write_summary(self.folder)

    def summary(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "graphs": [graph.as_json() for graph in self.graphs],
            "capture": [vars(event) for event in self.capture_events],
            "files": self._files,
        }

    def _write_graphs(self, folder: Path, report: GraphReport, gm: fx.GraphModule) -> None:
        self._write_passes(folder, report, report.passes)
        if not any(p.changed for p in report.passes):
            self._write(folder, f"graph_{report.id:03d}/00_unchanged.py", render_graph(gm))

    def _write_passes(self, folder: Path, report: GraphReport, passes: list[PassReport]) -> None:
        changed = [p for p in report.passes if p.changed]
        for number, p in enumerate(changed, start=1):
            if p in passes:
                for moment, text in p.texts().items():
                    self._write(folder, f"graph_{report.id:03d}/{number:02d}_{p.name}.{moment}.py", text)

    def _write(self, folder: Path, name: str, text: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self._files.append(name)

    def _write_summary(self, folder: Path) -> None:
        # Replaced in one step: a process that is killed leaves the last complete file.
        partial = folder / "summary.json.partial"
        partial.write_text(json.dumps(self.summary(), indent=1))
        partial.replace(folder / "summary.json")

    def _remove_earlier_dump(self, folder: Path) -> None:
        """Delete what an earlier process wrote here, and nothing else."""
        summary = folder / "summary.json"
        try:
            names = json.loads(summary.read_text())["files"]
        except (OSError, ValueError, KeyError):
            return
        for name in names:
            path = folder / name
            if path.suffix == ".py" and path.resolve().is_relative_to(folder.resolve()):
                path.unlink(missing_ok=True)
        summary.unlink(missing_ok=True)


_sessions: dict[str, Session] = {}
_sessions_lock = threading.Lock()


def session_for(folder: str) -> Session:
    """The process's session for a dump folder. In a distributed job each rank has a folder of its own inside."""
    rank = os.environ.get("RANK")
    path = os.path.abspath(folder if rank is None else os.path.join(folder, f"rank_{rank}"))
    with _sessions_lock:
        if path not in _sessions:
            _sessions[path] = Session(path)
        return _sessions[path]
