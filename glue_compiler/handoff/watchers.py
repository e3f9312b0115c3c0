"""Who follows the graphs of a compile: by its options, and by who listens to torch's structured trace."""

from __future__ import annotations

import functools

from glue_compiler.capture import LayerKind
from glue_compiler.compat import tracing
from glue_compiler.memory.layer_plan import LayerPlan
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline.observer import Observer, Observers
from glue_compiler.report.observers import GraphObserver, ReportObserver
from glue_compiler.report.progress import ProgressLine, terminal
from glue_compiler.report.session import Session, session_for
from glue_compiler.verify.graph_check import GraphCheck


def session_of(options: GlueOptions, default: Session) -> Session:
    """Where reports go: to ``default`` if it keeps them, else to the dump's folder, if the options name one."""
    return default if default.keeps or options.dump is None else session_for(options.dump)


def watch(
    options: GlueOptions,
    session: Session,
    layers: LayerKind | None = None,
    layer_plan: LayerPlan | None = None,
) -> Observer:
    """The observers of one graph.

    Args:
        layers: which the graph is compiled for. layer_plan: tells the report how many of them keep.
    """
    reporting = ReportObserver(session, None if layers is None else str(layers))
    found: list[Observer] = [reporting]
    if session.folder is not None or tracing.trace_is_on():
        found.append(GraphObserver(reporting.report, session))
    if (stream := terminal()) is not None:
        found.append(ProgressLine(stream))
    if layer_plan is not None:
        layer_plan.told.append(functools.partial(session.show_plan, reporting.report))
    if options.verify:
        found.append(GraphCheck(reporting.report, options, session.folder))
    return Observers(*found)
