"""Observers that report: one builds the data, one shows the graphs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from torch import fx

from glue_compiler import compat
from glue_compiler.fx import bodies
from glue_compiler.fx.deferred_logits import join_deferred
from glue_compiler.fx.prologues import join_prologues
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.graph_pass import Prologue
from glue_compiler.observer import Observer
from glue_compiler.pipeline import PassReport
from glue_compiler.report.dump import render_graph, render_pair
from glue_compiler.report.graph_report import GraphReport, host_syncs_of
from glue_compiler.report.kept_step import KeptStep, ShownPass, origins
from glue_compiler.report.session import Session


class ReportObserver(Observer):
    """Builds the report of a graph, and adds it to ``session`` when the graph is handed off."""

    name = "report"

    def __init__(self, session: Session) -> None:
        self.session = session
        self.report = GraphReport()

    def captured(self, gm: fx.GraphModule) -> None:
        self.report.nodes_before = bodies.count_nodes(gm)
        self.report.compile_id = compat.current_compile_id()
        if found := compat.graph_break_of(gm):
            reason, stack = found
            last = stack[-1] if stack else None
            self.report.graph_break = (reason, f"{last.filename}:{last.lineno} in {last.name}" if last else "")

    def pass_finished(self, report: PassReport, graph: fx.GraphModule | TrainingPair) -> None:
        self.report.passes.append(report)

    def marked(self, report: PassReport) -> None:
        self.report.passes.append(report)

    def handed_off(self, gm: fx.GraphModule, prologues: Sequence[Prologue]) -> None:
        self.report.nodes_after = bodies.count_nodes(gm)
        if self.session.keeps:
            self.report.host_syncs = host_syncs_of(gm, prologues)
        self.session.add_graph(self.report)

    def restored(self, step: KeptStep) -> None:
        self.report.passes += [each.report for each in step.passes]
        self.report.from_cache = True

    def refused(self, passes: Sequence[str], reason: str) -> None:
        error = f"left out, as the compiler failed on its result: {reason}"
        self.report.passes = [
            dataclasses.replace(p, changed=False, error=error) if p.name in passes and p.changed else p
            for p in self.report.passes
        ]
        self.session.show(self.report, ())


class GraphObserver(Observer):
    """Renders a graph around each pass that changes it, for the session's dump and for torch's structured trace.

    Attributes:
        origins: of the graph that was handed off (:func:`~glue_compiler.report.kept_step.origins`).
        step: what the passes over the training step did, when they are done.
    """

    name = "dump"

    def __init__(self, report: GraphReport, session: Session) -> None:
        self.report = report
        self.session = session
        self.text = ""
        self.waiting: list[ShownPass] = []
        self.origins = b""
        self.step: KeptStep | None = None
        self._marks: list[ShownPass] = []

    def captured(self, gm: fx.GraphModule) -> None:
        self.text = render_graph(gm)

    def pass_finished(self, report: PassReport, graph: fx.GraphModule | TrainingPair) -> None:
        if not report.changed:
            self.waiting.append(ShownPass(report, {}))
            return
        texts = {"before": self.text}
        if isinstance(graph, TrainingPair):
            texts["after"] = render_pair(graph)
        else:
            texts["after"] = render_graph(graph)
        if report.prologue is not None and isinstance(graph, fx.GraphModule):
            texts["prologue"] = render_graph(report.prologue.graph)
            texts["whole"] = render_graph(join_prologues(graph, [report.prologue]))
        elif report.deferred and isinstance(graph, fx.GraphModule):
            texts["whole"] = render_graph(join_deferred(graph, report.deferred))
        self.text = texts["after"]
        self.waiting.append(ShownPass(report, texts))

    def handed_off(self, gm: fx.GraphModule, prologues: Sequence[Prologue]) -> None:
        self.origins = origins(gm)
        shown, self.waiting = self.waiting, []
        self._show(shown, unchanged=None if any(each.texts for each in shown) else self.text)

    def marked(self, report: PassReport) -> None:
        self._marks.append(ShownPass(report, {}))

    def partitioned(self, pair: TrainingPair) -> None:
        self.text = render_pair(pair)

    def pair_finished(self, pair: TrainingPair) -> None:
        self.step = KeptStep((*self._marks, *self.waiting))
        self._show(self.waiting)

    def restored(self, step: KeptStep) -> None:
        self._show(step.passes)

    def _show(self, passes: Sequence[ShownPass], unchanged: str | None = None) -> None:
        compat.trace_artifact("glue_passes", lambda: json.dumps(self.report.as_json()), encoding="json")
        for each in passes:
            for moment, text in each.texts.items():
                compat.trace_artifact(f"glue_{each.report.name}_{moment}", text.__str__)
        self.session.show(self.report, [each for each in passes if each.texts], unchanged)
