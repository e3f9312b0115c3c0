"""share_layers: layers that are alike are compiled once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from glue_compiler.compat import inductor
from glue_compiler.fx import bodies
from glue_compiler.graph_pass import Numerics, PairPass, PassContext, PassResult, Skip
from glue_compiler.ops.offload import TRANSFERS
from glue_compiler.passes.share_layers.plan import WORTH, plan_sharing
from glue_compiler.passes.share_layers.rewrite import share

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.fx.training_pair import TrainingPair
    from glue_compiler.options import GlueOptions


class ShareLayers(PairPass):
    """Call one body where forward or backward do the same again and again, each time with other weights.

    Counts: ``bodies`` made, ``calls`` of them, ``steps`` that are not compiled a second time.
    """

    name: ClassVar[str] = "share_layers"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    default: ClassVar[bool] = False

    def cache_options(self, options: GlueOptions) -> Any:
        return options.compiler

    def wants_pairs(self, graph: fx.GraphModule, options: GlueOptions) -> bool:
        return bodies.count_nodes(graph) > WORTH

    def run_pair(self, pair: TrainingPair, context: PassContext) -> PassResult:
        if inductor.uses_cuda_graphs(context.options.inductor):
            return PassResult(changed=False, skips=(Skip("CUDA graphs are on, which bodies were not tried with"),))
        counts = {"bodies": 0, "calls": 0, "steps": 0}
        skips: list[Skip] = []
        for gm, where in ((pair.forward, "forward"), (pair.backward, "backward")):
            if transfer := _transfer_in(gm):
                reason = f"{where} copies to the host and back while it computes, which bodies were not tried with"
                skips.append(Skip(reason, transfer))
                continue
            plan = plan_sharing(gm.graph, random_numbers=context.options.compiler == "aot_eager")
            skips += [Skip(f"in {where}, {reason}") for reason in plan.reasons]
            if not plan.bodies:
                skips.append(Skip(f"{where} does nothing at length that it does again"))
            chosen = context.fuel.allowed((f"share {len(b.pieces)} pieces of {where}", b) for b in plan.bodies)
            if chosen:
                share(gm, chosen)
            counts["bodies"] += len(chosen)
            counts["calls"] += sum(len(body.pieces) for body in chosen)
            counts["steps"] += sum((len(body.pieces) - 1) * body.size for body in chosen)
        return PassResult(changed=counts["bodies"] > 0, counts=counts, skips=tuple(dict.fromkeys(skips)))


def _transfer_in(gm: fx.GraphModule) -> str | None:
    """The name of a node that starts a copy to or from the host, or waits for one."""
    return next((node.name for node in gm.graph.nodes if node.target in TRANSFERS), None)
