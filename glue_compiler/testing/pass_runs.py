"""One pass over one graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from glue_compiler.deferred.joined import join_deferred
from glue_compiler.errors import GlueContractError, GlueOptionError, unknown_name
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.options import parse_options
from glue_compiler.pipeline import registry
from glue_compiler.pipeline.graph_pass import GraphPass, PairPass
from glue_compiler.pipeline.prologues import join_prologues
from glue_compiler.pipeline.results import PassReport, Stage
from glue_compiler.pipeline.run import Pipeline


@dataclass(frozen=True)
class PassRun:
    """What a pass did.

    Attributes:
        before: a copy of the graph (or pair) from before.
        after: the graph itself, which was rewritten in place; with a prologue that was split off, or logits that wait
            for a reader, as one graph with those.
        report: counts, skips and single rewrites.
    """

    before: Any
    after: Any
    report: PassReport

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.report.counts)

    @property
    def rewrites(self) -> list[str]:
        """What was done, single rewrite by single rewrite."""
        return [rewrite.what for rewrite in self.report.rewrites]

    @property
    def skip_reasons(self) -> list[str]:
        return [skip.reason for skip in self.report.skips]


def run_pass(graph: fx.GraphModule | TrainingPair, graph_pass: Any, **options: Any) -> PassRun:
    """Run one pass on ``graph``, in place, with the checks of a compile; its errors are raised.

    Copies of a graph share its symbols, and a pass may unify some: run another pass on another :func:`capture`, not on
    a copy.

    Args:
        graph: from :func:`capture`.
        graph_pass: the name of a pass, or the user's own: an object, a class, ``"module:Class"``.
        options: glue's options.

    Raises:
        GlueOptionError: for an unknown pass or option.
        GlueContractError: for a pass that breaks the protocol; says what to change.
        GlueInvariantError: if the pass leaves an inconsistent graph.
    """
    found = _resolve(graph_pass)
    parsed = parse_options({"strict": True, "regions": "whole", **options}, None, [found.name], environment={})
    pipeline = Pipeline.of_one(found, parsed)
    if isinstance(graph, TrainingPair):
        copied = TrainingPair(copy_graph_module(graph.forward), copy_graph_module(graph.backward), graph.num_outputs)
        if not isinstance(found, PairPass):
            raise GlueContractError(f"pass '{found.name}' takes a captured graph, not a forward and backward pair")
        (report,) = pipeline.run_pair(graph, [found])
        return PassRun(copied, graph, report)
    before = copy_graph_module(graph)
    (report,) = pipeline.run(graph, Stage.CAPTURED)
    after = graph if report.prologue is None else join_prologues(graph, [report.prologue])
    return PassRun(before, join_deferred(after, report.deferred), report)


def _resolve(graph_pass: Any) -> GraphPass:
    if isinstance(graph_pass, str) and ":" not in graph_pass:
        known = {each.name: each for each in registry.all_passes()}
        if graph_pass not in known:
            raise GlueOptionError(unknown_name("pass", graph_pass, known, list_as="Passes"))
        return known[graph_pass]
    return registry.resolve_pass(graph_pass)
