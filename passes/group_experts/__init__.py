"""group_experts: a loop over experts becomes one sort and grouped products."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, ClassVar, TypeVar

from torch import fx

from glue_compiler import compat
from glue_compiler.capture.regions import SpeculativeRegion
from glue_compiler.fuel import Fuel
from glue_compiler.fx import bodies
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.fx.values import unbacked_in, value_of
from glue_compiler.graph_pass import GraphPass, Numerics, PassContext, PassResult, Skip
from glue_compiler.passes.group_experts.analysis import plan_grouping
from glue_compiler.passes.group_experts.fallback_products import fallback_products, replace_fallback
from glue_compiler.passes.group_experts.planner import Plan
from glue_compiler.passes.group_experts.rewrite import erase_dead_counts, group
from glue_compiler.passes.group_experts.segment_rewrite import group_segments
from glue_compiler.passes.group_experts.segments import plan_segments
from glue_compiler.passes.group_experts.slice_rewrite import write_slices
from glue_compiler.passes.group_experts.slices import plan_slices
from glue_compiler.passes.group_experts.speculation import proved_regions

AnyPlan = TypeVar("AnyPlan", bound=Plan[Any])


class GroupExperts(GraphPass):
    """Compute all experts of a loop at once: no ``nonzero`` or piece for each expert, and no host sync.

    Counts: ``loops_grouped``, ``experts_grouped`` (over all loops), ``loops_sliced`` (not grouped, but one sort finds
    the rows of all experts), ``fallbacks_replaced`` (transformers' operator for grouped products without a kernel).
    """

    name: ClassVar[str] = "group_experts"
    numerics: ClassVar[Numerics] = Numerics.CLOSE
    proves_loops: ClassVar[bool] = True

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        counts: Counter[str] = Counter()
        skips: dict[Skip, None] = {}
        modules = list(bodies.graph_modules(graph))
        proved: list[SpeculativeRegion] = []
        if any(_has_rows_of_unknown_number(module) for module in modules):
            proved = self._group(graph, modules, context, counts, skips)
        for module in modules:
            for node in fallback_products(module):
                if context.fuel.take(f"replace {node.name}"):
                    replace_fallback(module, node, context.effects)
                    counts["fallbacks_replaced"] += 1
        counts = +counts  # without zeros
        return PassResult(changed=bool(counts), counts=dict(counts), skips=tuple(skips), proved=tuple(proved))

    def _group(
        self,
        graph: fx.GraphModule,
        modules: list[fx.GraphModule],
        context: PassContext,
        counts: Counter[str],
        skips: dict[Skip, None],
    ) -> list[SpeculativeRegion]:
        """Returns the regions that are proved, if what is written here stays."""
        regions: list[SpeculativeRegion] = []
        numbers = number_values(graph, context.effects).numbers
        plans = [(module, plan_grouping(module, numbers, context.effects)) for module in modules]
        segment_plans = [(module, plan_segments(module, numbers, context.effects)) for module in modules]
        plans = [(module, _limited(plan, context.fuel)) for module, plan in plans]
        segment_plans = [(module, _limited(plan, context.fuel)) for module, plan in segment_plans]
        gone = {node for _, plan in plans for loop in plan.loops for node in loop.absorbed}
        # 2.11 cannot compile the backward of a checkpointed body in which numbers are read.
        several = modules if compat.version_at_least(2, 12) else modules[:1]
        slices = [(m, each) for m in several for each in plan_slices(m, numbers, context.effects, gone)]
        for (module, plan), (_, segments) in zip(plans, segment_plans, strict=True):
            proved, unproved = proved_regions(
                module, [*plan.loops, *plan.alone], segments.loops, numbers, context.effects
            )
            skips.update(dict.fromkeys(unproved))
            # Backwards: a loop that adds to the result of another finds it under the name that the plan has.
            for loop in reversed(plan.loops):
                group(module, loop, context.effects)
                counts["loops_grouped"] += 1
                counts["experts_grouped"] += loop.num_experts
            erase_dead_counts(module, proved, context.effects)
            regions += proved
            skips.update(dict.fromkeys(plan.skips))
        for module, sliced in slices:
            if not context.fuel.take(f"slice the rows of {sliced.num_experts} experts"):
                continue
            write_slices(module, sliced, context.effects)
            counts["loops_sliced"] += 1
        for module, segments in segment_plans:
            group_segments(module, segments.loops, context.effects)
            counts["loops_grouped"] += len(segments.loops)
            counts["experts_grouped"] += sum(loop.num_experts for loop in segments.loops)
            skips.update(dict.fromkeys(segments.skips))
        return regions


def _limited(plan: AnyPlan, fuel: Fuel) -> AnyPlan:
    """The part of ``plan`` that ``fuel`` allows."""
    loops = ((f"group {loop.num_experts} experts at {loop.last.name}", loop) for loop in plan.loops)
    return dataclasses.replace(plan, loops=list(fuel.allowed(loops)))


def _has_rows_of_unknown_number(module: fx.GraphModule) -> bool:
    """Every loop over experts has; most graphs have none, and need no closer look."""
    return any(unbacked_in(value_of(node)) for node in module.graph.nodes)
