"""Who follows the graphs of a compile: by its options, and by who listens to torch's structured trace."""

from __future__ import annotations

from dataclasses import dataclass

from glue_compiler import compat
from glue_compiler.compat.partition import Memory
from glue_compiler.fuel import RewriteCounter
from glue_compiler.observer import Observer, Observers
from glue_compiler.options import GlueOptions
from glue_compiler.replan.replanner import PlannedGraph
from glue_compiler.report.kept_step import StepMemory
from glue_compiler.report.observers import GraphObserver, ReportObserver
from glue_compiler.report.progress import ProgressLine, terminal
from glue_compiler.report.session import Session, session_for
from glue_compiler.report.step_meter import StepMeter
from glue_compiler.verify.graph_check import GraphCheck


def session_of(options: GlueOptions, default: Session) -> Session:
    """Where reports go: to ``default`` if it keeps them, else to the dump's folder, if the options name one."""
    return default if default.keeps or options.dump is None else session_for(options.dump)


@dataclass(frozen=True)
class Watch:
    """Who follows one graph: ``observer``, and ``graphs`` among them if somebody looks at the graphs."""

    observer: Observer
    graphs: GraphObserver | None

    def memory(self, counter: RewriteCounter) -> Memory | None:
        """What is to be told when a cache has the graph's training step; None if nobody looks."""
        graphs = self.graphs
        return StepMemory(lambda: graphs.step, self.observer, counter) if graphs is not None else None

    def origins(self) -> bytes:
        """What is shown of the graph that was handed off and is in no key of torch's."""
        return self.graphs.origins if self.graphs is not None else b""


def watch(options: GlueOptions, session: Session, planned: PlannedGraph | None = None) -> Watch:
    """The observers of one graph; ``planned``: one more, that tells the others' report what it finds."""
    reporting = ReportObserver(session)
    found: list[Observer] = [reporting]
    graphs = None
    if session.folder is not None or compat.trace_is_on():
        graphs = GraphObserver(reporting.report, session)
        found.append(graphs)
    if (stream := terminal()) is not None:
        found.append(ProgressLine(stream))
    if options.budget is not None and (session.keeps or session.folder is not None):
        found.append(StepMeter(reporting.report, session))
    if planned is not None:
        planned.report_to(reporting.report, session)
        found.append(planned)
    if options.verify:
        found.append(GraphCheck(reporting.report, options, session.folder))
    return Watch(Observers(*found), graphs)
