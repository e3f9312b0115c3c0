"""The entry point: ``torch.compile(model, backend="glue")`` calls ``glue`` with each graph that Dynamo captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any
from weakref import WeakSet

from torch import fx

from glue_compiler import capture, compat, registry
from glue_compiler.fuel import RewriteCounter
from glue_compiler.fx import bodies
from glue_compiler.fx.prologues import join_prologues
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.graph_pass import Stage
from glue_compiler.handoff import HandOff, hand_off, hand_off_in_parts
from glue_compiler.options import GlueOptions, extra_passes_in, parse_options
from glue_compiler.pipeline import Pipeline
from glue_compiler.report.dump import render_graph, render_pair
from glue_compiler.report.session import GraphReport, Session, session_for
from glue_compiler.verify.graph_check import GraphCheck


class GlueBackend:
    """A Dynamo backend: captured graph in, compiled callable out.

    Args:
        hand_off: what compiles the rewritten graph.
        session: collects what was done; by default the one of the ``dump`` folder, if there is one.
    """

    __name__ = "glue"

    def __init__(self, hand_off: HandOff = hand_off, session: Session | None = None) -> None:
        self._hand_off = hand_off
        self._session = session
        self.frames: WeakSet[CodeType] = WeakSet()
        """The code objects that were compiled with this backend."""
        self.rewrites = RewriteCounter()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        **_: Any,  # 2.15 passes name=
    ) -> Callable[..., Any]:
        compat.warn_if_untested()
        pipeline = self._pipeline_for({"mode": mode, "options": options})
        session = self._session_for(pipeline.options)
        report = GraphReport.of_captured(gm)
        is_shown = compat.trace_is_on() or (session is not None and session.folder is not None)
        folder = session.folder if session is not None else None
        verify = GraphCheck(gm, report, pipeline.options, folder) if pipeline.options.verify else None
        with self.rewrites.undone_on_error():
            report.passes += pipeline.run(gm, Stage.CAPTURED, render_graph if is_shown else None)
            # Before anything is compiled: the frame is then converted again without the assumption.
            capture.check_proved(
                gm,
                [region for p in report.passes for region in p.proved],
                (skip.reason for p in report.passes for skip in p.skips),
            )
        report.nodes_after = bodies.count_nodes(gm)
        report.trace()
        if session:
            session.add_graph(report, gm)
        pair_passes = pipeline.pair_passes(gm)
        prologues = [p.prologue for p in report.passes if p.prologue is not None]
        if verify:
            verify.show_after(join_prologues(gm, prologues))

        def edit_pair(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
            pair = TrainingPair(forward, backward, num_outputs)
            if verify:
                verify.show_pair(render_pair(pair))
            added = pipeline.run_pair(pair, pair_passes, render_pair if is_shown else None)
            report.add_passes(added)
            if verify:
                verify.show_pair(render_pair(pair))
            if session:
                session.update_graph(report, added)

        wanted = {name: value for p in pair_passes for name, value in p.inductor_options(pipeline.options).items()}
        own = dataclasses.replace(pipeline.options, inductor={**wanted, **pipeline.options.inductor})
        call = hand_off_in_parts(
            self._hand_off, prologues, gm, example_inputs, own, pipeline.uuid(), edit_pair if pair_passes else None
        )
        return verify.around(call) if verify else call

    def reset(self) -> None:
        """Called by ``torch.compiler.reset()``: host memory and streams go back."""
        from glue_compiler.ops.copy_engine import engine

        engine.release()
        self.rewrites.reset()

    def begin_frame(self, stored: Mapping[str, Any], code: CodeType) -> bool:
        pipeline = self._pipeline_for(stored)  # wrong options and contracts are errors before anything is traced
        self.frames.add(code)
        return any(p.proves_loops for p in pipeline.passes)

    def record_capture(self, stored: Mapping[str, Any], event: capture.CaptureEvent) -> None:
        session = self._session_for(self._pipeline_for(stored).options)
        if session:
            session.add_capture_event(event)

    def _pipeline_for(self, stored: Mapping[str, Any]) -> Pipeline:
        passes = registry.with_extra(registry.all_passes(), extra_passes_in(stored.get("options")))
        options = parse_options(stored.get("options"), stored.get("mode"), [p.name for p in passes])
        if options.verify:  # Inductor's own random numbers are others than those of the graph from before glue
            inductor = {"fallback_random": True, **options.inductor}
            options = dataclasses.replace(options, inductor=inductor)
        return Pipeline([p for p in passes if compat.can_run(p.name)], options, self.rewrites)

    def _session_for(self, options: GlueOptions) -> Session | None:
        return self._session or (session_for(options.dump) if options.dump else None)


capture.install(GlueBackend)

glue = GlueBackend()
