"""group_experts: a loop over experts becomes one sort and grouped products.

``read.py`` finds loops and proves what ``plan.py`` says of them, ``write.py`` writes them, and ``decisions.py`` has the
order of it all. ``speculation.py`` proves code that capture traced although eager code skips it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch
from torch import fx

from glue_compiler.capture.regions import Loops
from glue_compiler.compat import versions
from glue_compiler.fx import bodies
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.fx.values import unbacked_in, value_of
from glue_compiler.passes.group_experts.decisions import Decisions
from glue_compiler.passes.group_experts.other_products import other_products, write_grouped_linear
from glue_compiler.passes.group_experts.permuted_rows import may_take_rows
from glue_compiler.passes.group_experts.write_permuted_rows import replace_permuted_rows
from glue_compiler.pipeline.graph_pass import GraphPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics


class GroupExperts(GraphPass):
    """Compute all experts of a loop at once: no ``nonzero`` or piece for each expert, and no host sync.

    Counts: ``loops_grouped``, ``experts_grouped`` (over all loops), ``loops_sliced`` (not grouped, but one sort finds
    the rows of all experts), ``fallbacks_replaced`` (transformers' operator for grouped products without a kernel),
    ``products_replaced`` (torch's operator, where another package has the faster kernel), ``rows_taken`` and
    ``rows_summed`` (from and to tokens in the order of a sort, without adding with atomics in backward),
    ``masks_removed`` (of such rows, that hold nowhere).
    """

    name: ClassVar[str] = "group_experts"
    numerics: ClassVar[Numerics] = Numerics.CLOSE
    proves_loops: ClassVar[Loops] = Loops.EXPERTS

    def cache_options(self, options: Any) -> Any:
        return options.kernels

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        modules = list(bodies.graph_modules(graph))
        has_loops = any(_has_rows_of_unknown_number(module) for module in modules)
        decided = _decided(graph, modules, context) if has_loops else []
        counts: Counter[str] = Counter()
        changed = [each.put_in(counts) for each in decided]
        for module in modules:
            for node, operands, counted in other_products(module, context.effects, context.options.kernels):
                if context.fuel.take(f"replace {node.name}"):
                    write_grouped_linear(module, node, operands, context.effects)
                    counts[counted] += 1
        if any(may_take_rows(node) for module in modules for node in module.graph.nodes):
            replace_permuted_rows(lambda: _operators_of(graph, modules, context.effects), context, counts)
        counts = +counts  # without zeros
        if context.options.kernels == "torch" and (any(changed) or counts):
            _without_packages(modules)
        skips = dict.fromkeys(skip for each in decided for skip in each.skips)
        proved = tuple(region for each in decided for region in each.proved)
        return PassResult(any(changed) or bool(counts), dict(counts), tuple(skips), proved=proved)


def _decided(graph: fx.GraphModule, modules: list[fx.GraphModule], context: PassContext) -> list[Decisions]:
    operators = _operators_of(graph, modules, context.effects)
    decided = [Decisions(module, operators[module], context.fuel) for module in modules]
    # 2.11 cannot compile the backward of a checkpointed body in which numbers are read.
    for each in decided if versions.torch_version() >= (2, 12) else decided[:1]:
        each.add_row_indices()
    return decided


def _without_packages(modules: list[fx.GraphModule]) -> None:
    """No kernel of another package for the products that this pass wrote; ``grouped_linear_list`` has none."""
    for module in modules:
        written = module.graph.find_nodes(op="call_function", target=torch.ops.glue.grouped_linear.default)
        for node in written:
            if len(node.args) == 5:
                node.args = (*node.args, False)
        if written:
            module.recompile()


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
