"""specialize_attention: attention loses a mask that is proved, and reads one that is not over block lists."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

from torch import fx

from glue_compiler.compat.inductor import uses_cuda_graphs
from glue_compiler.errors import GlueDocumentsWarning
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.passes.specialize_attention.analysis import Settings, plan_attention
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader
from glue_compiler.passes.specialize_attention.mixed_documents import Mixed, in_words, mixed_documents
from glue_compiler.passes.specialize_attention.returned_masks import returned_masks
from glue_compiler.passes.specialize_attention.rewrite import apply_plan
from glue_compiler.pipeline.graph_pass import GraphPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics


class SpecializeAttention(GraphPass):
    """Compute attention without its mask, where the mask is proved to say what a kernel knows by itself, and under any
    other mask over the blocks in which it shows a key.

    Counts: ``unmasked``, ``causal``, ``packed`` and ``listed`` attentions by the form that they took, ``nodes_erased``.
    """

    name: ClassVar[str] = "specialize_attention"
    numerics: ClassVar[Numerics] = Numerics.CLOSE

    def cache_options(self, options: Any) -> Any:
        few_sizes = uses_cuda_graphs(options.inductor)
        return (options.compiler, options.kernels, tuple(sorted(options.assume.items())), few_sizes)

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        reader = MaskReader(Operators(number_values(graph, context.effects), context.effects))
        assume_sorted = context.options.assume.get("sorted_document_ids", False)
        settings = Settings(context.options.compiler, context.options.kernels, assume_sorted)
        plan = plan_attention(reader, settings)
        written = ((f"write {each.site.output.name} as {each.form}", each) for each in plan.replacements)
        plan.replacements = list(context.fuel.allowed(written))
        if context.options.mixed_documents == "warn":
            _warn_of(mixed_documents(plan, reader, graph.graph))
        returned, skips = returned_masks(reader, assume_sorted=assume_sorted)
        counts = apply_plan(plan, reader, few_sizes=uses_cuda_graphs(context.options.inductor))
        return PassResult(
            changed=bool(plan.replacements),
            counts=dict(counts),
            skips=tuple(dict.fromkeys((*plan.skips, *skips))),
            relies_on=tuple(reader.asked),
            returned_masks=returned,
        )


def _warn_of(found: list[Mixed]) -> None:
    """Python shows equal messages once."""
    if found:
        warnings.warn(
            f"documents of a packed batch are mixed, as in eager mode: {in_words(found)}. Attention keeps documents "
            "apart, and these compute tokens from those of the document before. Pad documents instead of packing "
            "them, or give these layers the documents' borders; options={'mixed_documents': 'ignore'} is silent.",
            GlueDocumentsWarning,
            stacklevel=2,
        )
