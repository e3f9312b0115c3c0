"""The entry point: ``torch.compile(model, backend="glue")`` calls ``glue`` with each graph that Dynamo captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from glue_compiler import capture, compat, registry
from glue_compiler.fx import bodies
from glue_compiler.graph_pass import Stage
from glue_compiler.handoff import hand_off
from glue_compiler.options import GlueOptions, parse_options
from glue_compiler.pipeline import Pipeline
from glue_compiler.report.session import GraphReport, Session, session_for

HandOff = Callable[[fx.GraphModule, Sequence[Any], GlueOptions, bytes], Callable[..., Any]]


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
        glue_options = self.options_for({"mode": mode, "options": options})
        pipeline = Pipeline(registry.all_passes(), glue_options)
        session = self.session_of(glue_options)
        report = GraphReport.of_captured(gm)
        report.passes += pipeline.run(gm, Stage.CAPTURED, session.snapshot if session else None)
        report.nodes_after = bodies.count_nodes(gm)
        report.trace()
        if session:
            session.add_graph(report, gm)
        return self._hand_off(gm, example_inputs, glue_options, pipeline.uuid())

    def options_for(self, stored: Mapping[str, Any]) -> GlueOptions:
        """The options of one ``torch.compile`` call. Raises GlueOptionError."""
        return parse_options(stored.get("options"), stored.get("mode"), registry.pass_names())

    def session_of(self, options: GlueOptions) -> Session | None:
        return self._session or (session_for(options.dump) if options.dump else None)


def _on_capture_event(backend: GlueBackend, stored: Mapping[str, Any], event: capture.CaptureEvent) -> None:
    session = backend.session_of(backend.options_for(stored))
    if session:
        session.add_capture_event(event)


capture.install(lambda backend: isinstance(backend, GlueBackend), _on_capture_event)

glue = GlueBackend()
