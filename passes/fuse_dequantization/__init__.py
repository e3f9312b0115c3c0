"""fuse_dequantization: a weight of 4 bits is dequantised by one kernel, which the compiled code launches itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import glue_compiler.ops.nf4  # noqa: F401  a graph from the cache calls the operator, and no pass runs for it
from glue_compiler.fx import bodies
from glue_compiler.passes.fuse_dequantization.read import find_calls, is_candidate
from glue_compiler.passes.fuse_dequantization.write import write
from glue_compiler.pipeline.graph_pass import PairPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics, Skip

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.fx.training_pair import TrainingPair
    from glue_compiler.options import GlueOptions


class FuseDequantization(PairPass):
    """Dequantise bitsandbytes' weights of 4 bits by ``glue::dequantize_nf4``; the products with them are torch's.

    Counts: ``dequantizations``, and how many of them are of ``products``.
    """

    name: ClassVar[str] = "fuse_dequantization"
    numerics: ClassVar[Numerics] = Numerics.CLOSE

    def wants_pairs(self, graph: fx.GraphModule, options: GlueOptions) -> bool:
        return any(is_candidate(node) for gm in bodies.graph_modules(graph) for node in gm.graph.nodes)

    def run_pair(self, pair: TrainingPair, context: PassContext) -> PassResult:
        counts = {"dequantizations": 0, "products": 0}
        skips: list[Skip] = []
        for gm in (pair.forward, pair.backward):
            calls, left = find_calls(gm.graph)
            skips += left
            chosen = list(context.fuel.allowed((f"dequantise the weight of {call.node.name}", call) for call in calls))
            write(gm, chosen, context.effects.fake_mode)
            counts["dequantizations"] += len(chosen)
            counts["products"] += sum(call.product is not None for call in chosen)
        return PassResult(counts["dequantizations"] > 0, counts, tuple(dict.fromkeys(skips)))
