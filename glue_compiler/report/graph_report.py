"""What was done to one graph, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.values import source_line
from glue_compiler.pipeline.results import PassReport, Prologue


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

    nodes_before: int = 0
    nodes_after: int = 0
    passes: list[PassReport] = field(default_factory=list)
    graph_break: tuple[str, str] | None = None
    """(reason, user's line) of the graph break that this graph ends at."""
    region: str | None = None
    """The layers that share the graph, as ``DecoderLayer x36``."""
    compile_id: str | None = None
    host_syncs: list[HostSync] = field(default_factory=list)
    memory_plan: str | None = None
    """How many of the layers that share the graph keep what backward needs, as the latest step has it."""
    id: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "region": self.region,
            "compile_id": self.compile_id,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "graph_break": dict(zip(("reason", "source"), self.graph_break, strict=True)) if self.graph_break else None,
            "host_syncs": [vars(sync) for sync in self.host_syncs],
            "passes": [_pass_as_json(p) for p in self.passes],
            "memory_plan": self.memory_plan,
        }


def _pass_as_json(report: PassReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "stage": report.stage.value,
        "numerics": report.numerics.value,
        "changed": report.changed,
        "counts": dict(report.counts),
        "rewrites": [vars(rewrite) for rewrite in report.rewrites],
        "skips": [vars(skip) for skip in report.skips],
        "ms": round(report.milliseconds, 3),
        "error": report.error,
    }


def host_syncs_of(gm: fx.GraphModule, prologues: Sequence[Prologue]) -> list[HostSync]:
    """The nodes of a graph, and of what runs in front of it once per batch, that read a value back from the device."""
    moved = [sync for prologue in prologues for sync in _host_syncs_in(prologue.graph)]
    return _host_syncs_in(gm) + [replace(sync, once_per_batch=True) for sync in moved]


def _host_syncs_in(gm: fx.GraphModule) -> list[HostSync]:
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
