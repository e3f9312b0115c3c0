"""Partitions a joint graph by what passes have marked; where those marks do not serve, by simpler ones, or by none."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glue_compiler.errors import GlueWarning, first_line
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.snapshots import Snapshot
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.graph_pass import JointPass, PairPass, PassContext, Skip

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.compat.partition import Graphs
    from glue_compiler.pipeline import PassReport, Pipeline

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Attempt:
    reports: tuple[PassReport, ...]
    graphs: Graphs
    excess: int


def partition_marked(
    pipeline: Pipeline,
    joint: fx.GraphModule,
    num_outputs: int,
    passes: Sequence[JointPass],
    on_pairs: Sequence[PairPass],
    partition: Callable[[], Graphs],
) -> tuple[tuple[PassReport, ...], Graphs]:
    """The forward and the backward graph, and what ``passes`` did for them.

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
    chosen = list(passes)
    first: tuple[PassReport, ...] = ()
    while not found or found[-1].excess:
        excess = 0
        pipeline.counter.count = start
        reports = tuple(pipeline.run_joint(joint, num_outputs, chosen))
        first = first or reports
        is_last = not any(report.changed for report in reports)
        try:
            graphs = partition()
            excess = 0 if is_last and not found else _excess(pipeline, passes, on_pairs, graphs, num_outputs)
        except Exception as failure:
            if (is_last and not found) or pipeline.options.strict:
                raise
            log.debug("a marked graph is not partitioned", exc_info=True)
            text = first_line(failure)
            error = error or text
            reasons.append(Skip(f"torch's partitioner refuses what is planned ({text})"))
        else:
            unmarked = tuple(
                dataclasses.replace(each, changed=False, counts={}, rewrites=(), drawing=None) for each in first
            )
            found.append(_Attempt(unmarked if is_last else reports, graphs, excess))
            reasons += [Skip(f"what is planned would be missed by {excess} in the graphs made of it")] if excess else []
        if is_last:
            break
        before.restore()
        simpler = [each.simpler(report, excess) for each, report in zip(chosen, reports, strict=True)]
        chosen = [each for each in simpler if each is not None]
    best = min(found, key=lambda attempt: attempt.excess)
    pipeline.counter.count = start + sum(len(report.rewrites) for report in best.reports)
    if error is not None:
        names = ", ".join(each.name for each in passes)
        warnings.warn(
            f"glue's pass {names}: torch's partitioner refuses its marks ({error}); the step is compiled with simpler "
            f"ones or without. Set strict=True to raise, GLUE_DISABLE={names} to leave it out.",
            GlueWarning,
            stacklevel=2,
        )
    told = reasons if best is not found[0] or error is not None else []
    return tuple(
        dataclasses.replace(report, skips=(*report.skips, *told), error=report.error or error)
        for report in best.reports
    ), best.graphs


def _excess(
    pipeline: Pipeline,
    passes: Sequence[JointPass],
    on_pairs: Sequence[PairPass],
    graphs: Graphs,
    num_outputs: int,
) -> int:
    """By how much a pair will miss what ``passes`` are for, as ``on_pairs`` will leave it."""
    pair = TrainingPair(*graphs, num_outputs)

    def worst(pair: TrainingPair) -> int:
        context = PassContext(pipeline.options, EffectAnalysis.for_graph(pair.forward))
        return max(each.excess(pair, context) for each in passes)

    # The passes over pairs only lower it, so that a copy is seldom needed.
    if not worst(pair):
        return 0
    finished = TrainingPair(copy_graph_module(pair.forward), copy_graph_module(pair.backward), pair.num_outputs)
    count = pipeline.counter.count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GlueWarning)  # it is told when it is done in earnest
        pipeline.run_pair(finished, [each for each in on_pairs if each.changes_peak])
    pipeline.counter.count = count
    return worst(finished)
