"""Writes a loop that was proved to be one grouped computation as one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.capture.regions import HITS, NonEmptyBranch, SpeculativeRegion
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.values import expression, value_of
from glue_compiler.passes.group_experts.analysis import ExpertLoop
from glue_compiler.passes.group_experts.drafts import Draft, drafted
from glue_compiler.passes.group_experts.grouped_body import Emitter, GroupedBody
from glue_compiler.passes.group_experts.left_alone import LeftAlone
from glue_compiler.passes.group_experts.steps import Gather, Row, RowWise, SlotWeight, Step, product_of, rows_of

_glue = torch.ops.glue
aten = torch.ops.aten


def draft_group(gm: fx.GraphModule, loop: ExpertLoop, operators: Operators) -> Draft:
    """The grouped form, where the last expert adds its rows. Raises LeftAlone if it cannot be written."""

    def write() -> Callable[[], None]:
        emit = Emitter(gm, (*loop.results, loop.last), operators.analysis, loop.autocast)
        with gm.graph.inserting_before(loop.last):
            combined = _Grouped(emit, operators, loop).write()
        wanted = value_of(loop.accumulator if loop.in_place else loop.last)
        replaces = loop.starts_at_zero and _is_alike(value_of(combined), wanted)
        if not replaces and not loop.sinks[0].adds:
            raise LeftAlone("the tensor that is assigned to has another layout than what would replace it")
        return lambda: _put_in(gm, loop, emit, combined, replaces)

    return drafted(gm.graph, write)


def _is_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    described = [
        (t.dtype, t.device, t.dim(), expression(t.shape[-1]), tuple(map(expression, t.stride())))
        for t in (first, second)
    ]
    return described[0] == described[1]


def _put_in(gm: fx.GraphModule, loop: ExpertLoop, emit: Emitter, combined: fx.Node, replaces: bool) -> None:
    accumulator, result = loop.accumulator, combined
    if not replaces:
        with gm.graph.inserting_before(loop.last):
            result = gm.graph.call_method("add_" if loop.in_place else "add", (accumulator, combined))
        result.meta.update(emit.meta, example_value=value_of(accumulator if loop.in_place else loop.last))
    for sink in reversed(loop.sinks):
        sink.node.replace_all_uses_with(accumulator if loop.in_place and sink.node is not loop.last else result)
        gm.graph.erase_node(sink.node)
    if replaces and loop.in_place:
        accumulator.replace_all_uses_with(result)
        gm.graph.erase_node(accumulator)
    for node in reversed(gm.graph.nodes):
        if node in loop.absorbed and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()


def erase_dead_counts(gm: fx.GraphModule, proved: Collection[SpeculativeRegion], analysis: EffectAnalysis) -> bool:
    """Erase what only the loops over hit experts and the branches used, with what it was counted from.

    Returns whether there was anything.
    """
    present = set(gm.graph.nodes)
    before = len(present)
    for region in proved:
        if isinstance(region, NonEmptyBranch) and region.condition:
            for node in (region.condition.node, region.condition.number):
                if node in present:
                    _erase_unused(gm, node, analysis)
                    present = set(gm.graph.nodes)
    for hits in [node for node in gm.graph.nodes if node.meta.get(HITS) in proved]:
        waiting = [hits]
        # Sizes of the nonzero, and the checks that it has between no and all rows.
        for node in waiting:
            waiting += [user for user in node.users if user not in waiting]
        if all(_is_check_of_size(node, hits) for node in waiting[1:]):
            counts = hits.args[0]
            for node in sorted(waiting, reverse=True):
                gm.graph.erase_node(node)
            _erase_unused(gm, counts, analysis)
    if len(gm.graph.nodes) == before:
        return False
    gm.recompile()
    return True


def _is_check_of_size(node: fx.Node, hits: fx.Node) -> bool:
    """The size of a nonzero, or a check that it lies between zero and the number of elements."""
    if node.target is torch.ops.aten._assert_scalar.default:
        return True
    if node.target in (operator.ge, operator.le):
        elements = value_of(hits.args[0]).numel()  # type: ignore[arg-type]
        bound = node.args[1]
        return isinstance(bound, int) and (bound <= 0 if node.target is operator.ge else bound >= elements)
    return node.target is torch.ops.aten.sym_size.int


def _erase_unused(gm: fx.GraphModule, node: Any, analysis: EffectAnalysis) -> None:
    """The comparison, the sum and the mask behind a number of rows, or a vector of them."""
    while isinstance(node, fx.Node) and not node.users and analysis.of(gm, node).kind is Kind.PURE:
        source = node.args[0] if node.args else None
        gm.graph.erase_node(node)
        node = source


class _Grouped(GroupedBody):
    """The rows that the experts select, sorted by expert."""

    def __init__(self, emit: Emitter, operators: Operators, loop: ExpertLoop) -> None:
        selected = loop.selected
        if loop.first_expert:
            selected = emit.call(torch.sub, selected, loop.first_expert)
        sort = emit.call(_glue.expert_sort.default, selected, loop.num_experts)
        self.order, self.inverse, _, offsets = (emit.call(operator.getitem, sort, i) for i in range(4))
        super().__init__(emit, operators, loop, self.order, offsets)
        self.loop = loop
        self.slot_weights: dict[tuple[fx.Node, bool], fx.Node] = {}

    def write(self) -> fx.Node:
        """Returns ``[tokens, width]``: the sum of each token's rows."""
        end, weights = self._weighted_end()
        rows = self.compute(end)
        dtype = value_of(self.loop.accumulator).dtype
        scale = self._weights_by_slot(weights) if weights else None
        # The sum over slots is taken in fp32 and rounded once, which the loop did after each expert.
        arguments = (rows, self.order, self.inverse, self.offsets, self.loop.top_k, scale, dtype)
        return self.emit.call(_glue.expert_combine.default, *arguments)

    def _weighted_end(self) -> tuple[int, SlotWeight | None]:
        """(step whose rows are combined, weights): a last multiplication by the slots' weights is left to the sum."""
        steps = self.loop.steps
        last = len(steps) - 1
        step = steps[last]
        used = [sum(row.step == i for other in steps for row in rows_of(other)) for i in range(len(steps))]
        if self._is_cast(step) and used[last] == 0:
            last = rows_of(step)[0].step
            step = steps[last]
        factors = product_of(step, self.operators)
        if factors is not None:
            for rows, factor in (factors, factors[::-1]):
                if not isinstance(rows, Row) or not isinstance(factor, Row):
                    continue
                weights = steps[factor.step]
                if (
                    isinstance(weights, SlotWeight)
                    and weights.tail == (1,)
                    and used[last] <= 1
                    and used[factor.step] == 1
                ):
                    return rows.step, weights
        return len(steps) - 1, None

    def _is_cast(self, step: Step) -> bool:
        """To the accumulator's dtype, which the sum is rounded to anyway."""
        calls = self.operators.calls(step.node) if isinstance(step, RowWise) else None
        value = value_of(step.node)
        casts = calls is not None and len(calls) == 1 and calls[0].operator in (aten.to, aten._to_copy, aten.type_as)
        return casts and value.dtype == value_of(self.loop.accumulator).dtype and len(rows_of(step)) == 1

    def _leaf(self, step: Step) -> fx.Node:
        if isinstance(step, Gather):
            arguments = (step.source, self.order, self.inverse, self.offsets, self.loop.top_k)
            return self.emit.call(_glue.expert_gather.default, *arguments)
        assert isinstance(step, SlotWeight)
        flat = self.emit.method("reshape", self._weights_by_slot(step), -1, 1)
        # One "token" per slot: the row of slot s is row s of the flat weights.
        rows = self.emit.call(_glue.expert_gather.default, flat, self.order, self.inverse, self.offsets, 1)
        return self._reshaped(rows, step.tail)

    def _weights_by_slot(self, step: SlotWeight) -> fx.Node:
        """``[tokens, top_k]``, or ``[tokens]`` for one slot."""
        key = (step.source, step.by_expert)
        if key not in self.slot_weights:
            source = step.source
            if step.by_expert:
                selected = self.loop.selected
                if value_of(selected).dtype != torch.int64:
                    selected = self.emit.method("to", selected, torch.int64)
                if value_of(selected).dim() == 1:
                    selected = self.emit.method("unsqueeze", selected, 1)
                # A slot that selects no expert has no column; its weight is not used.
                first, count = self.loop.first_expert, self.loop.num_experts
                selected = self.emit.method("clamp", selected, first, first + count - 1)
                source = self.emit.call(torch.gather, source, 1, selected)
            elif value_of(source).dim() == 1 and self.loop.top_k > 1:
                source = self.emit.method("unsqueeze", source, 1)
                source = self.emit.method("expand", source, -1, self.loop.top_k)
            self.slot_weights[key] = source
        return self.slot_weights[key]
