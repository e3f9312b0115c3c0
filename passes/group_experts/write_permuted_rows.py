"""Writes rows that are taken from tokens, and put back, as operators in which each token finds its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import fx

from glue_compiler.fx.dead_nodes import erase_dead
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.values import value_of
from glue_compiler.passes.group_experts.grouped_body import after, saved_weights
from glue_compiler.passes.group_experts.permuted_rows import PermutedRows, SummedRows, TakenRows
from glue_compiler.pipeline.graph_pass import PassContext

aten, _glue = torch.ops.aten, torch.ops.glue


def replace_permuted_rows(
    read: Callable[[], Mapping[fx.GraphModule, Operators]], context: PassContext, counts: Counter[str]
) -> None:
    """``read``: each graph module as it is then. Counts ``masks_removed``, ``rows_taken`` and ``rows_summed``."""
    found = _taken(read())
    masks = [each for rows in found for each in rows.idle_masks()]
    for node, source in masks:
        if context.fuel.take(f"remove {node.name}"):
            node.replace_all_uses_with(source)
            node.graph.erase_node(node)
            counts["masks_removed"] += 1
    if masks:
        found = _taken(read())
    for rows, taken in found.items():
        sums = list(rows.summed(taken))
        writer = _Writer(rows.gm, rows.operators)
        for each in sums:
            if context.fuel.take(f"replace {each.node.name}"):
                writer.sum(each)
                counts["rows_summed"] += 1
        for one in taken:
            # Nothing needs some of them by now, or an order that is equal to another one's.
            is_there = not one.node._erased and not one.order._erased
            if is_there and context.fuel.take(f"replace {one.node.name}"):
                writer.take(one)
                counts["rows_taken"] += 1
        rows.gm.recompile()


def _taken(operators: Mapping[fx.GraphModule, Operators]) -> dict[PermutedRows, list[TakenRows]]:
    """Of each graph module that takes rows; what is read of it otherwise, too."""
    readers = [PermutedRows(gm, operators[gm]) for gm in operators]
    return {rows: taken for rows in readers if (taken := list(rows.taken()))}


class _Writer:
    def __init__(self, gm: fx.GraphModule, operators: Operators) -> None:
        self.gm = gm
        self.operators = operators
        self.make = NodeMaker(operators.analysis.fake_mode)
        self.places: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]] = {}
        self.replaced: dict[fx.Node, fx.Node] = {}

    def take(self, rows: TakenRows) -> None:
        places = self._places(rows.order, rows.node)
        with self._before(rows.node, rows.node):
            tokens = self.replaced.get(rows.tokens, rows.tokens)
            made = self.make.call(_glue.expert_gather.default, tokens, *places, rows.top_k)
        self._replace(rows.node, made)

    def sum(self, rows: SummedRows) -> None:
        places = self._places(rows.order, rows.node)
        with self._before(rows.node, rows.node):
            source = self.replaced.get(rows.rows, rows.rows)
            weights = rows.weights
            if weights is not None:
                weights = saved_weights(self.make, self.operators, weights, rows.node)
            dtype = value_of(rows.node).dtype
            made = self.make.call(_glue.expert_combine.default, source, *places, rows.top_k, weights, dtype)
        self._replace(rows.node, made)

    def _before(self, node: fx.Node, source: fx.Node) -> AbstractContextManager[None]:
        return self.make.before(node, self.operators.mode(node), source)

    def _places(self, order: fx.Node, source: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        """As ``expert_sort`` gives them: the slot of each row, the row of each slot, and where the rows end."""
        if order not in self.places:
            kind = {"dtype": torch.int32, "device": value_of(order).device}
            with self._before(after(order), source):
                narrow = self.make.method("to", order, torch.int32)
                slots = self.make.size(order, 0)
                numbers = self.make.call(torch.arange, slots, **kind)
                inverse = self.make.call(aten.scatter.src, numbers, 0, order, numbers)
                ends = self.make.call(torch.full, (1,), slots, **kind)
            self.places[order] = narrow, inverse, ends
        return self.places[order]

    def _replace(self, node: fx.Node, made: fx.Node) -> None:
        read = node.all_input_nodes
        node.replace_all_uses_with(made)
        self.gm.graph.erase_node(node)
        self.replaced[node] = made
        erase_dead(self.operators.numbering, read)
