"""drop_padding: tokens that a padding mask hides are not computed."""

from __future__ import annotations

import warnings
from typing import ClassVar

from torch import fx

from glue_compiler.compat.symbols import allows_sizes_from_data
from glue_compiler.errors import GlueWarning
from glue_compiler.fx.flow import Refused
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.fx.values import source_line
from glue_compiler.options import GlueOptions
from glue_compiler.passes.drop_padding.between_graphs import reads_of_others, returned_tokens
from glue_compiler.passes.drop_padding.domain import find_domain, tokens_given
from glue_compiler.passes.drop_padding.plan import plan_rows
from glue_compiler.passes.drop_padding.prefixes import share_prefixes
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
        settings = (options.padding, options.prefix, options.regions, options.compiler, options.kernels, options.verify)
        return (*settings, tuple(sorted(options.assume.items())))

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        if context.options.padding != "drop":
            return PassResult(False)
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
            in_layers = options.regions == "auto"
            plan = plan_rows(reader, domain, in_layers=in_layers)
            returned = returned_tokens(plan, graph.graph, in_layers=in_layers)
            others = reads_of_others(plan, reader)
        except Refused as refusal:
            if tokens_given(reader):
                _warn_of(refusal)
            return PassResult(False, skips=(_skip(refusal),), relies_on=tuple(reader.asked))
        skips = []
        if options.prefix == "share":
            try:
                plan = share_prefixes(plan, reader)
            except Refused as refusal:
                skips.append(_skip(refusal, "each row's tokens are computed: "))
        if not context.fuel.take("compute the tokens that count alone"):
            return PassResult(False)
        for each in others:
            _warn_of(each)
        counts = apply_plan(plan, reader)
        begun = (node for node in plan.begun if node.op == "placeholder")
        return PassResult(
            True,
            counts,
            skips=tuple(skips),
            relies_on=tuple(reader.asked),
            under_one_mask=() if domain.source is None else (domain.source, *begun),
            returned_tokens=returned,
        )


def _skip(refusal: Refused, before: str = "") -> Skip:
    reason = before + refusal.reason
    return Skip.at(refusal.node, reason) if refusal.node is not None else Skip(reason)


def _warn_of(refusal: Refused) -> None:
    line = "" if refusal.node is None else f" ({source_line(refusal.node)})"
    warnings.warn(
        "padding='drop': a graph is given tokens of which those that padding hides are zeros, and may read them where "
        f"eager reads what it has computed there: {refusal.reason}{line}. With options={{'regions': 'whole'}} such a "
        "model is left as it is",
        GlueWarning,
        stacklevel=2,
    )
