"""group_experts: a loop over experts becomes one sort and grouped products."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from torch import fx

from glue_compiler import compat
from glue_compiler.capture.regions import SpeculativeRegion
from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.fx.values import unbacked_in, value_of
from glue_compiler.graph_pass import GraphPass, Numerics, PassContext, PassResult, Skip
from glue_compiler.passes.group_experts.decisions import Decisions
from glue_compiler.passes.group_experts.fallback_products import fallback_products, replace_fallback


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
        changed, proved = False, list[SpeculativeRegion]()
        if any(_has_rows_of_unknown_number(module) for module in modules):
            changed, proved = self._group(graph, modules, context, counts, skips)
        for module in modules:
            for node in fallback_products(module):
                if context.fuel.take(f"replace {node.name}"):
                    replace_fallback(module, node, context.effects)
                    counts["fallbacks_replaced"] += 1
        counts = +counts  # without zeros
        return PassResult(changed or bool(counts), dict(counts), tuple(skips), proved=tuple(proved))

    def _group(
        self,
        graph: fx.GraphModule,
        modules: list[fx.GraphModule],
        context: PassContext,
        counts: Counter[str],
        skips: dict[Skip, None],
    ) -> tuple[bool, list[SpeculativeRegion]]:
        """Returns whether it has changed the graph, and the regions that are proved if what it wrote stays."""
        operators = _operators_of(graph, modules, context.effects)
        decided = [Decisions(module, operators[module], context.fuel) for module in modules]
        # 2.11 cannot compile the backward of a checkpointed body in which numbers are read.
        for each in decided if compat.version_at_least(2, 12) else decided[:1]:
            each.add_row_indices()
        changed = [each.put_in(counts) for each in decided]
        skips.update(skip for each in decided for skip in each.skips.items())
        return any(changed), [region for each in decided for region in each.proved]


def _operators_of(
    graph: fx.GraphModule, modules: list[fx.GraphModule], analysis: EffectAnalysis
) -> dict[fx.GraphModule, Operators]:
    """Bodies that are called several times are numbered by themselves."""
    whole = Operators(number_values(graph, analysis), analysis)
    known = {scope.module for scope in whole.numbering.scopes}
    return {
        module: whole if module in known else Operators(number_values(module, analysis, is_body=True), analysis)
        for module in modules
    }


def _has_rows_of_unknown_number(module: fx.GraphModule) -> bool:
    """Every loop over experts has; most graphs have none, and need no closer look."""
    return any(unbacked_in(value_of(node)) for node in module.graph.nodes)
