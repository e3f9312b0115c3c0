"""share_layers: layers that are alike are compiled once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from glue_compiler.compat import nested_graphs
from glue_compiler.fx import bodies
from glue_compiler.fx.values import value_of
from glue_compiler.passes.share_layers.kept_states import drop_states, find_unread_states
from glue_compiler.passes.share_layers.plan import WORTH, plan_sharing
from glue_compiler.passes.share_layers.rewrite import share
from glue_compiler.pipeline.graph_pass import PairPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics, Skip

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.fx.training_pair import TrainingPair
    from glue_compiler.options import GlueOptions


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class ShareLayers(PairPass):
    """Call one body where forward or backward do the same again and again, each time with other weights.

    Counts: ``bodies`` made, ``calls`` of them, ``steps`` that are not compiled a second time; ``states`` of random
    generators that are no longer kept around attention that draws nothing.
    """

    name: ClassVar[str] = "share_layers"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def cache_options(self, options: GlueOptions) -> Any:
        return options.compiler

    def wants_pairs(self, graph: fx.GraphModule, options: GlueOptions) -> bool:
        return bodies.count_nodes(graph) > WORTH

    def run_pair(self, pair: TrainingPair, context: PassContext) -> PassResult:
        is_eager = context.options.compiler == "aot_eager"
        if not is_eager and (reason := nested_graphs.why_no_bodies(context.options.inductor)):
            return PassResult(changed=False, skips=(Skip(reason),))
        unread = [("run attention without a random state", state) for state in find_unread_states(pair)]
        states = context.fuel.allowed(unread)
        drop_states(pair, states)
        counts = {"bodies": 0, "calls": 0, "steps": 0, "states": len(states)}
        skips: list[Skip] = []
        for gm, where in ((pair.forward, "forward"), (pair.backward, "backward")):
            if not is_eager and (convolution := _convolution_in_a_plane(gm.graph)) is not None:
                skips.append(
                    Skip(f"in {where}, Inductor lays values out anew around '{convolution.name}', in each layer")
                )
                continue
            plan = plan_sharing(gm.graph, random_numbers=is_eager)
            skips += [Skip(f"in {where}, {reason}") for reason in plan.reasons]
            if not plan.bodies:
                skips.append(Skip(f"{where} does nothing twice in pieces so long that {WORTH} operators are saved"))
            chosen = context.fuel.allowed((f"share {len(b.pieces)} pieces of {where}", b) for b in plan.bodies)
            if chosen:
                share(gm, chosen, where)
            counts["bodies"] += len(chosen)
            counts["calls"] += sum(len(body.pieces) for body in chosen)
            counts["steps"] += sum((len(body.pieces) - 1) * body.size for body in chosen)
        return PassResult(changed=any(counts.values()), counts=counts, skips=tuple(dict.fromkeys(skips)))


def _convolution_in_a_plane(graph: fx.Graph) -> fx.Node | None:
    """A convolution in two dimensions or more. Around those Inductor makes values channels-last, after this pass, and
    then it takes no body whose calls differ in an operand's strides."""
    found = (node for name in _CONVOLUTIONS for node in graph.find_nodes(op="call_function", target=name))
    return next((node for node in found if value_of(node.args[0]).dim() > 3), None)
