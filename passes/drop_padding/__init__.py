"""drop_padding: tokens that a padding mask hides are not computed."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from glue_compiler.compat.symbols import allows_sizes_from_data
from glue_compiler.fx.flow import Refused
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.options import GlueOptions
from glue_compiler.passes.drop_padding.domain import find_domain
from glue_compiler.passes.drop_padding.plan import plan_rows
from glue_compiler.passes.drop_padding.write import apply_plan
from glue_compiler.passes.specialize_attention.analysis import Settings
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader
from glue_compiler.pipeline.graph_pass import GraphPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics, Skip


class DropPadding(GraphPass):
    """Compute the tokens that count alone, where a graph computes token by token but for attention under one padding
    mask.

    Counts: ``operators`` that are written for these tokens, ``attentions``, ``put_back``: where all tokens are wanted,
    ``nodes_erased``.
    """

    name: ClassVar[str] = "drop_padding"
    numerics: ClassVar[Numerics] = Numerics.CLOSE

    def cache_options(self, options: GlueOptions) -> object:
        settings = (options.padding, options.regions, options.compiler, options.kernels, options.verify)
        return (*settings, tuple(sorted(options.assume.items())))

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        if context.options.padding != "drop":
            return PassResult(False)
        if context.options.regions == "auto":
            return PassResult(False, skips=(Skip("with options={'regions': 'auto'} each layer is a graph of its own"),))
        if context.options.verify:
            return PassResult(False, skips=(Skip("verification compares what eager computes of padding, too"),))
        if not allows_sizes_from_data(context.effects.fake_mode):
            reason = "this frame is converted without sizes that depend on data; what its capture tells says why"
            return PassResult(False, skips=(Skip(reason),))
        reader = MaskReader(Operators(number_values(graph, context.effects), context.effects))
        options = context.options
        assume_sorted = options.assume.get("sorted_document_ids", False)
        try:
            domain = find_domain(reader, Settings(options.compiler, options.kernels, assume_sorted))
            plan = plan_rows(reader, domain)
        except Refused as refusal:
            skip = Skip.at(refusal.node, refusal.reason) if refusal.node is not None else Skip(refusal.reason)
            return PassResult(False, skips=(skip,), relies_on=tuple(reader.asked))
        if not context.fuel.take("compute the tokens that count alone"):
            return PassResult(False)
        counts = apply_plan(plan, reader)
        return PassResult(True, counts, relies_on=tuple(reader.asked))
