"""hoist_metadata: compute equal packed-batch metadata once per graph."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from torch import fx

from glue_compiler.fx.value_numbering import number_values
from glue_compiler.passes.hoist_metadata.analysis import limit_plan, plan_hoisting
from glue_compiler.passes.hoist_metadata.rewrite import apply_plan
from glue_compiler.pipeline.graph_pass import GraphPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics, Skip


class HoistMetadata(GraphPass):
    """Compute equal values once per graph, and outside of checkpoint bodies.

    Counts: ``merged`` nodes that repeated an earlier one, ``lifted`` values that moved out of bodies, ``replaced``
    computations in bodies that became operands, ``symbols_unified``, ``asserts_removed``, ``syncs_removed`` (host syncs
    of one forward pass).
    """

    name: ClassVar[str] = "hoist_metadata"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def cache_options(self, options: Any) -> Any:
        return options.hoist_limit

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        shape_env = context.shape_env
        counts: Counter[str] = Counter()
        skips: dict[Skip, None] = {}
        numbering = number_values(graph, context.effects)
        # Innermost first: what leaves a nested body may leave the one around it too.
        for depth in range(max(scope.depth for scope in numbering.scopes), -1, -1):
            plans = [
                plan_hoisting(numbering, scope, context.options.hoist_limit, shape_env)
                for scope in numbering.scopes
                if scope.depth == depth and (scope.children or depth == 0)
            ]
            plans = [limit_plan(plan, context.fuel) for plan in plans]
            for plan in plans:
                counts += apply_plan(plan, numbering, shape_env)
                skips.update(dict.fromkeys(plan.skips))
            if depth and any(not plan.is_empty for plan in plans):
                numbering = number_values(graph, context.effects)
        return PassResult(changed=bool(counts), counts=dict(counts), skips=tuple(skips))
