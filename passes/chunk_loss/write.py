"""Writes losses without their logits, and erases what only the logits needed."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.deferred.outputs import DeferredOutput
from glue_compiler.errors import GlueInvariantError
from glue_compiler.fx.dead_nodes import erase_dead
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.operators import Operators, Value
from glue_compiler.fx.value_numbering import Numbering
from glue_compiler.fx.values import expression, expressions, requires_grad, value_of
from glue_compiler.passes.chunk_loss.analysis import LossPlan, Replacement
from glue_compiler.passes.chunk_loss.groups import Fused, Group, Statistics
from glue_compiler.passes.chunk_loss.losses import Site
from glue_compiler.passes.chunk_loss.operands import Operands
from glue_compiler.passes.chunk_loss.outputs import defer_outputs_of
from glue_compiler.passes.chunk_loss.row_nodes import RowWriter
from glue_compiler.passes.chunk_loss.site_formulas import SiteFormula

aten, _glue = torch.ops.aten, torch.ops.glue


def apply_plan(plan: LossPlan, operators: Operators) -> tuple[Counter[str], tuple[DeferredOutput, ...]]:
    """Rewrite all losses; returns what was done, and the outputs of the graph that are deferred."""
    counts: Counter[str] = Counter()
    deferred: list[DeferredOutput] = []
    replaced: dict[fx.Node, fx.Node] = {}
    returned = {each.scope: len(each.scope.graph.output_node().args[0]) for each in plan.replacements}  # type: ignore[arg-type]
    for replacement in plan.replacements:
        writer = _Writer(replacement, RowWriter(NodeMaker(operators.analysis.fake_mode), operators, replaced))
        writer.write_sizes()
        order = {node: place for place, node in enumerate(replacement.scope.graph.nodes)}
        for group in sorted(replacement.groups, key=lambda group: min(order[site.node] for site in group.sites)):
            writer.write_group(min(group.sites, key=lambda site: order[site.node]), group)
            counts["losses" if isinstance(group, Fused) else "statistics"] += 1
        for site in (site for group in replacement.groups for site in group.sites):
            writer.replace(site)
        deferred += defer_outputs_of(replacement, writer.operands, returned[replacement.scope])
        counts["deferred"] += len(replacement.outputs)
        counts["nodes_erased"] += erase_dead(operators.numbering, writer.abandoned())
        if replacement.head.shared is not None:
            counts["nodes_erased"] += _erase_moves(replacement.head.inside, operators.numbering)
    if plan.replacements:
        operators.numbering.recompile()
    return counts, tuple(deferred)


class _Writer:
    """Writes what takes the place of one head's logits."""

    def __init__(self, replacement: Replacement, rows: RowWriter) -> None:
        self.replacement = replacement
        self.rows, self.make, self.operators = rows, rows.make, rows.operators
        self.operands = Operands(replacement.head, self.rows)
        self.results: dict[Site, fx.Node] = {}

    def write_sizes(self) -> None:
        """Sizes that were read of the logits, or of what is made of them, are read elsewhere."""
        near = self.rows.node(self.replacement.head.terms[0].rows)
        for node in self.replacement.uses.sizes:
            with self._before(node):
                found = value_of(node)
                taken: Any
                if isinstance(found, tuple | list):
                    taken = tuple(self.rows.size(expression(size), near) for size in found)
                else:
                    taken = self.rows.size(expression(found), near)
            _replace_uses(node, taken)

    def write_group(self, first: Site, group: Group) -> None:
        with self._before(first.node):
            if isinstance(group, Fused):
                self._write_fused(group)
                return
            formula = self._write_statistics(group)
        for site in group.sites:
            with self._before(site.node):
                self.results[site] = formula.result(site)

    def replace(self, site: Site) -> None:
        node, result = self.operators.node_of(site.value), self.results[site]
        assert node is not None
        expected, found = value_of(node), value_of(result)
        if _kind(expected) != _kind(found):
            raise GlueInvariantError(f"'{node.name}' without logits is {_kind(found)}, and was {_kind(expected)}")
        node.replace_all_uses_with(result)
        self.rows.replaced[node] = result

    def abandoned(self) -> list[fx.Node]:
        uses, head = self.replacement.uses, self.replacement.head
        sites = [self.operators.node_of(site.value) or site.node for site in uses.sites]
        wide = [value.node for value in head.inside] + uses.nodes
        return [*wide, *uses.sizes, *(site.node for site in uses.sites), *sites, *uses.dead]

    def _before(self, node: fx.Node) -> AbstractContextManager[None]:
        return self.make.before(node, self.operators.mode(node), node)

    def _is_on(self, site: Site) -> bool:
        return not site.is_detached and self.operators.is_grad_on(site.node)

    def _write_fused(self, group: Fused) -> None:
        site = group.site
        assert site.loss is not None
        assert site.target is not None
        rows, weights, bias = self.operands.flat(site.wide.path, site.is_detached)
        is_on = self._is_on(site)
        needs_grad = [is_on and each is not None and requires_grad(value_of(each)) for each in (*rows, *weights, bias)]
        weight = site.loss.class_weight
        shape = value_of(self.rows.node(site.target)).shape
        target = self.rows.reshaped(self.rows.node(site.target), (math.prod(map(expression, shape)),))
        both = self.make.call(
            _glue.linear_cross_entropy.default,
            rows,
            weights,
            bias,
            target,
            None if weight is None else self.rows.node(weight),
            site.loss.reduction,
            site.loss.ignore_index,
            site.loss.label_smoothing,
            group.scores.scale,
            group.scores.softcap,
            self.operators.dtype(site.value),
            needs_grad,
            bool(group.predictions),
        )
        self.results[site] = self.make.call(operator.getitem, both, 0)
        if group.predictions:
            found = self.make.call(operator.getitem, both, 1)
            lead = self.operands.lead(site.wide.path, site.is_detached)
            for each in group.predictions:
                shaped = self.make.call(aten.clone.default, self._shaped_as(found, lead))
                if each.keepdim:
                    shaped = self.make.call(aten.unsqueeze.default, shaped, each.wide.classes)
                self.results[each] = shaped

    def _shaped_as(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        return self.rows.reshaped(node, expressions(value_of(rows).shape[:-1]))

    def _write_statistics(self, group: Statistics) -> SiteFormula:
        head = self.replacement.head
        formula = SiteFormula(group, self.rows, head)
        rows, weights, bias = self.operands.flat(group.path, group.is_detached)
        target = formula.flat_target()
        found = self.make.call(
            _glue.linear_row_statistics.default,
            rows,
            weights,
            bias,
            target,
            group.scores.scale,
            group.scores.softcap,
            group.dtype,
            list(formula.wants),
            # Of a row whose target another rank has, this one's logits count all the same.
            head.shared is None and all(site.loss is not None for site in group.sites),
        )
        lead = self.operands.lead(group.path, group.is_detached)
        formula.take(found, lead, self.rows.node(head.terms[0].weight.value))
        return formula


def _erase_moves(inside: Sequence[Value], numbering: Numbering) -> int:
    """Erase the product of a shared head and its gather, which moves numbers and is not known to be pure."""
    erased = 0
    for value in reversed(inside):
        if not value.node.users and not value.node._erased:
            operands = value.node.all_input_nodes
            value.node.graph.erase_node(value.node)
            erased += 1 + erase_dead(numbering, operands)
    return erased


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, expressions(tensor.shape)


def _replace_uses(node: fx.Node, taken: Any) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda arg: taken if arg is node else arg)
        user.kwargs = fx.map_arg(user.kwargs, lambda arg: taken if arg is node else arg)
