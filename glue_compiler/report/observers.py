"""Observers that report: one builds the data, one shows the graphs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from torch import fx

from glue_compiler.compat import tracing
from glue_compiler.deferred.joined import join_deferred
from glue_compiler.fx import bodies
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.pipeline.observer import Observer
from glue_compiler.pipeline.prologues import join_prologues
from glue_compiler.pipeline.results import PassReport, Prologue
from glue_compiler.report.dump import render, render_graph, render_pair
from glue_compiler.report.graph_report import GraphReport, host_syncs_of
from glue_compiler.report.session import Session, ShownPass


class ReportObserver(Observer):
    """Builds the report of a graph, and adds it to ``session`` when the graph is handed off."""

    name = "report"

    def __init__(self, session: Session, region: str | None = None) -> None:
        self.session = session
        self.report = GraphReport(region=region)

    def captured(self, gm: fx.GraphModule) -> None:
        self.report.nodes_before = bodies.count_nodes(gm)
        self.report.compile_id = tracing.current_compile_id()
        if found := tracing.graph_break_of(gm):
            reason, stack = found
            last = stack[-1] if stack else None
            self.report.graph_break = (reason, f"{last.filename}:{last.lineno} in {last.name}" if last else "")

    def pass_finished(self, report: PassReport, graph: fx.GraphModule | TrainingPair) -> None:
        self.report.passes.append(report)

    def handed_off(self, gm: fx.GraphModule, prologues: Sequence[Prologue]) -> None:
        self.report.nodes_after = bodies.count_nodes(gm)
        if self.session.keeps:
            self.report.host_syncs = host_syncs_of(gm, prologues)
        self.session.add_graph(self.report)

    def refused(self, passes: Sequence[str], reason: str) -> None:
        error = f"left out, as the compiler failed on its result: {reason}"
        self.report.passes = [
            dataclasses.replace(p, changed=False, error=error) if p.name in passes and p.changed else p
            for p in self.report.passes
        ]
        self.session.show(self.report, ())


class GraphObserver(Observer):
    """Renders a graph around each pass that changes it, for the session's dump and for torch's structured trace."""

    name = "dump"

    def __init__(self, report: GraphReport, session: Session) -> None:
        self.report = report
        self.session = session
        self.text = ""
        self.waiting: list[ShownPass] = []

    def captured(self, gm: fx.GraphModule) -> None:
        self.text = render_graph(gm)

    def pass_finished(self, report: PassReport, graph: fx.GraphModule | TrainingPair) -> None:
        if not report.changed:
            self.waiting.append(ShownPass(report, {}))
            return
        texts = {"before": self.text, "after": render(graph)}
        if report.prologue is not None and isinstance(graph, fx.GraphModule):
            texts["prologue"] = render_graph(report.prologue.graph)
            texts["whole"] = render_graph(join_prologues(graph, [report.prologue]))
        elif report.deferred and isinstance(graph, fx.GraphModule):
            texts["whole"] = render_graph(join_deferred(graph, report.deferred))
        self.text = texts["after"]
        self.waiting.append(ShownPass(report, texts))

    def handed_off(self, gm: fx.GraphModule, prologues: Sequence[Prologue]) -> None:
        shown, self.waiting = self.waiting, []
        self._show(shown, unchanged=None if any(each.texts for each in shown) else self.text)

    def partitioned(self, pair: TrainingPair) -> None:
        self.text = render_pair(pair)

    def pair_finished(self, pair: TrainingPair) -> None:
        self._show(self.waiting)

    def _show(self, passes: Sequence[ShownPass], unchanged: str | None = None) -> None:
        tracing.trace_artifact("glue_passes", lambda: json.dumps(self.report.as_json()), encoding="json")
        for each in passes:
            for moment, text in each.texts.items():
                tracing.trace_artifact(f"glue_{each.report.name}_{moment}", text.__str__)
        self.session.show(self.report, [each for each in passes if each.texts], unchanged)
