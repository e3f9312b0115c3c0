"""Partitions a joint graph by what a pass has marked; where those marks do not serve, by simpler ones, or by none."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from glue_compiler.errors import GlueWarning, first_line
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.snapshots import Snapshot
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.pipeline.graph_pass import JointPass, PairPass, PassContext
from glue_compiler.pipeline.results import Skip

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.compat.partition import Graphs
    from glue_compiler.options import GlueOptions
    from glue_compiler.pipeline.fuel import RewriteCounter
    from glue_compiler.pipeline.results import PassReport

log = logging.getLogger(__name__)


class PassRunner(Protocol):
    """The pipeline, as far as it is asked here."""

    options: GlueOptions
    counter: RewriteCounter

    def run_joint(self, joint: fx.GraphModule, num_outputs: int, marking: JointPass) -> PassReport: ...
    def run_pair(self, pair: TrainingPair, passes: Sequence[PairPass]) -> Sequence[PassReport]: ...


@dataclass(frozen=True)
class _Attempt:
    report: PassReport
    graphs: Graphs
    excess: int


def partition_marked(
    pipeline: PassRunner,
    joint: fx.GraphModule,
    num_outputs: int,
    marking: JointPass,
    on_pairs: Sequence[PairPass],
    partition: Callable[[], Graphs],
) -> tuple[PassReport, Graphs]:
    """The forward and the backward graph, and what ``marking`` did for them.

    Marks are given up where the partitioner refuses them or where the finished pair misses what they are for
    (:meth:`JointPass.excess`): for those of a simpler pass, and in the end for the marks that the model came with. Of
    what was tried the pair that misses least is taken. With ``strict``, a refusal is raised.

    Args:
        on_pairs: what will run on the pair; it is judged as those of them will leave it that change its peak.
        partition: makes a pair of ``joint``, as it is marked at that moment.
    """
    before = Snapshot(joint)
    start = pipeline.counter.count
    found: list[_Attempt] = []
    reasons: list[Skip] = []
    error: str | None = None
    chosen: JointPass | None = marking
    first: PassReport | None = None
    while not found or found[-1].excess:
        excess = 0
        pipeline.counter.count = start
        report = pipeline.run_joint(joint, num_outputs, chosen) if chosen is not None else None
        first = first or report
        assert first is not None
        is_last = report is None or not report.changed
        try:
            graphs = partition()
            excess = 0 if is_last and not found else _excess(pipeline, marking, on_pairs, graphs, num_outputs)
        except Exception as failure:
            if (is_last and not found) or pipeline.options.strict:
                raise
            log.debug("a marked graph is not partitioned", exc_info=True)
            text = first_line(failure)
            error = error or text
            reasons.append(Skip(f"torch's partitioner refuses what is planned ({text})"))
        else:
            unmarked = dataclasses.replace(first, changed=False, counts={}, rewrites=())
            found.append(_Attempt(unmarked if report is None or is_last else report, graphs, excess))
            reasons += [Skip(f"what is planned would be missed by {excess} in the graphs made of it")] if excess else []
        if chosen is None or report is None or is_last:
            break
        before.restore()
        chosen = chosen.simpler(report, excess)
    best = min(found, key=lambda attempt: attempt.excess)
    pipeline.counter.count = start + len(best.report.rewrites)
    if error is not None:
        warnings.warn(
            f"glue's pass {marking.name}: torch's partitioner refuses its marks ({error}); the step is compiled with "
            f"simpler ones or without. Set strict=True to raise, GLUE_DISABLE={marking.name} to leave it out.",
            GlueWarning,
            stacklevel=2,
        )
    told = reasons if best is not found[0] or error is not None else []
    skips = (*best.report.skips, *told)
    return dataclasses.replace(best.report, skips=skips, error=best.report.error or error), best.graphs


def _excess(
    pipeline: PassRunner, marking: JointPass, on_pairs: Sequence[PairPass], graphs: Graphs, num_outputs: int
) -> int:
    """By how much a pair will miss what ``marking`` is for, as ``on_pairs`` will leave it."""
    pair = TrainingPair(*graphs, num_outputs)

    def excess_of(pair: TrainingPair) -> int:
        return marking.excess(pair, PassContext(pipeline.options, EffectAnalysis.for_graph(pair.forward)))

    # The passes over pairs only lower it, so that a copy is seldom needed.
    if not excess_of(pair):
        return 0
    finished = TrainingPair(copy_graph_module(pair.forward), copy_graph_module(pair.backward), pair.num_outputs)
    count = pipeline.counter.count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GlueWarning)  # it is told when it is done in earnest
        pipeline.run_pair(finished, [each for each in on_pairs if each.changes_peak])
    pipeline.counter.count = count
    return excess_of(finished)
