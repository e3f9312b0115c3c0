"""memoize_metadata: compute the metadata of a packed batch once per batch, whichever graphs ask for it."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from glue_compiler.fx.value_numbering import number_values
from glue_compiler.fx.values import is_call
from glue_compiler.passes.memoize_metadata.analysis import plan_prologue
from glue_compiler.passes.memoize_metadata.rewrite import split_off
from glue_compiler.pipeline.graph_pass import GraphPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics


class MemoizeMetadata(GraphPass):
    """Split off what depends on integer inputs alone, so that it runs once per batch and not in every call.

    Counts: ``prologue_nodes`` operators that moved, ``results`` handed to the rest, ``syncs_memoized`` host syncs of
    one forward pass that only a batch's first call makes.
    """

    name: ClassVar[str] = "memoize_metadata"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def cache_options(self, options: Any) -> Any:
        return options.memoize_threshold

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        numbering = number_values(graph, context.effects)
        plan = plan_prologue(numbering, context.options.memoize_threshold, context.shape_env)
        if plan.is_empty or not context.fuel.take(f"split off {len(plan.nodes)} nodes"):
            return PassResult(changed=False, skips=plan.skips)
        prologue = split_off(graph, plan, context.effects)
        counts = {
            "prologue_nodes": sum(is_call(node) for node in prologue.graph.graph.nodes),
            "results": len(prologue.results),
            "syncs_memoized": plan.syncs,
        }
        return PassResult(changed=True, counts=counts, skips=plan.skips, prologue=prologue)
