"""chunk_loss: losses of a projection to many classes in chunks of rows, and its logits for who reads them."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from glue_compiler.compat import dynamo
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.passes.chunk_loss.analysis import Settings, may_have_losses, plan_losses
from glue_compiler.passes.chunk_loss.write import apply_plan
from glue_compiler.pipeline.graph_pass import GraphPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics


def _why_logits_are_kept(context: PassContext) -> str | None:
    if context.options.logits == "kept":
        return "the option says logits='kept'"
    if dynamo.is_piece_for_ddp():
        return "DDP has cut the graph into pieces; torch._dynamo.config.optimize_ddp = False would leave it whole"
    return None


class ChunkLoss(GraphPass):
    """Compute cross entropies and other numbers of rows of logits without the logits, a chunk of rows at a time.

    Counts: ``losses`` and ``statistics``, the operators that took the place of losses: cross entropies alone, and all
    else; ``deferred``, the outputs that are computed when somebody reads them; ``nodes_erased``.
    """

    name: ClassVar[str] = "chunk_loss"
    numerics: ClassVar[Numerics] = Numerics.CLOSE

    def cache_options(self, options: Any) -> Any:
        return (options.logits, options.assume.get("ranks_agree", False))

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        if not may_have_losses(graph, context.effects):
            return PassResult(changed=False)
        operators = Operators(number_values(graph, context.effects), context.effects)
        agree = context.options.assume.get("ranks_agree", False)
        settings = Settings(_why_logits_are_kept(context), context.shape_env, agree)
        plan = plan_losses(operators, settings)
        written = ((f"take the losses of {each.head.value.node.name}", each) for each in plan.replacements)
        plan.replacements = list(context.fuel.allowed(written))
        counts, deferred = apply_plan(plan, operators)
        skips = tuple(dict.fromkeys(plan.skips))
        return PassResult(bool(plan.replacements), dict(counts), skips, deferred=deferred)
