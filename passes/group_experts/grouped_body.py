"""Writes the steps of a body for the rows of all experts at once."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.operators import Call, Operators
from glue_compiler.fx.values import storages_of, value_of
from glue_compiler.passes.group_experts.plan import GroupedLoop, LeftAlone, RoutedRows, SortedRows
from glue_compiler.passes.group_experts.steps import (
    AllRows,
    Gather,
    PerExpert,
    Product,
    Reshape,
    Row,
    RowWise,
    Separate,
    SlotWeight,
    Stacked,
    Step,
    Vector,
    rows_of,
)

_glue = torch.ops.glue


def after(node: fx.Node) -> fx.Node:
    """Where what reads ``node`` as it is made may stand; inputs come first."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def saved_weights(make: NodeMaker, operators: Operators, weights: fx.Node, at: fx.Node) -> fx.Node:
    """What is replaced saves weights for backward in the order of the rows, copies: they may be written afterwards."""
    is_private = operators.numbering.is_private_after(storages_of(value_of(weights)), at)
    return weights if is_private else make.call(_glue.private_copy.default, weights)


@dataclass
class GroupedBody:
    """Writes the steps of a loop for the rows of all experts, in the order of the experts.

    Attributes:
        offsets: where each expert's rows end.
        order: the slot of each row, and
        inverse: the row of each slot; None where the rows stand in order already.
        results: of steps. written: what several of them need.
    """

    make: NodeMaker
    operators: Operators
    loop: GroupedLoop
    offsets: fx.Node
    order: fx.Node | None = None
    inverse: fx.Node | None = None
    results: dict[int, fx.Node] = field(default_factory=dict)
    written: dict[Any, fx.Node] = field(default_factory=dict)

    def compute(self, end: int) -> fx.Node:
        """Write step ``end`` with all that it is computed from."""
        needed = self._needed(end)
        for i, step in enumerate(self.loop.steps):
            if i in needed:
                self.results[i] = self._step(step)
        return self.results[end]

    def _needed(self, end: int) -> set[int]:
        """The steps that step ``end`` is computed from, and itself."""
        needed = {end}
        for i in range(end, -1, -1):
            if i in needed:
                needed.update(row.step for row in rows_of(self.loop.steps[i]))
        return needed

    # -- steps

    def _step(self, step: Step) -> fx.Node:
        result = self._write_step(step)
        self._check(result, step)
        return result

    def _write_step(self, step: Step) -> fx.Node:
        if isinstance(step, Reshape):
            return self._reshaped(self.results[step.row.step], step.tail)
        if isinstance(step, Product):
            return self._product(step)
        if isinstance(step, RowWise) and (half := self._half(step)) is not None:
            return half
        if isinstance(step, RowWise):
            return self.make.create_node(step.op, step.target, self._argument(step.args), self._argument(step.kwargs))
        if isinstance(step, AllRows):
            return step.source
        if isinstance(step, Gather):
            assert isinstance(self.loop.partition, RoutedRows)
            return self._gathered(step.source, self.loop.partition.top_k)
        assert isinstance(step, SlotWeight)
        # One "token" per slot: the row of slot s is row s of the flat weights.
        flat = self.make.method("reshape", self.weights_by_slot(step), -1, 1)
        return self._reshaped(self._gathered(flat, 1), step.tail)

    def _gathered(self, source: fx.Node, top_k: int) -> fx.Node:
        return self.make.call(_glue.expert_gather.default, source, self.order, self.inverse, self.offsets, top_k)

    def weights_by_slot(self, step: SlotWeight) -> fx.Node:
        """``[tokens, top_k]``, or ``[tokens]`` for one slot."""
        rows, source = self.loop.partition, step.source
        assert isinstance(rows, RoutedRows)
        if step.by_expert:
            selected = self.make.proxy(rows.selected).to(torch.int64)
            if value_of(selected.node).dim() == 1:
                selected = selected.unsqueeze(1)
            # A slot that selects no expert has no column; its weight is not used.
            first, count = rows.first_expert, rows.num_experts
            return self.make.proxy(source).gather(1, selected.clamp(first, first + count - 1)).node
        if value_of(source).dim() == 1 and rows.top_k > 1:
            return self.make.proxy(source).unsqueeze(1).expand(-1, rows.top_k).node
        return source

    def _half(self, step: RowWise) -> fx.Node | None:
        """``x[..., ::2]`` or ``x[..., 1::2]``, where the body takes both of one ``x``."""
        which = self._alternating(step)
        if which is None or not any(
            isinstance(other, RowWise) and self._alternating(other) == 1 - which and rows_of(other) == rows_of(step)
            for other in self.loop.steps
        ):
            return None
        (row,) = rows_of(step)
        halves = self._once(row, lambda: self.make.call(_glue.deinterleave.default, self.results[row.step]))
        return self.make.call(operator.getitem, halves, which)

    def _product(self, step: Product) -> fx.Node:
        x = self.results[step.x.step]
        if isinstance(step.weight, Stacked) and not isinstance(step.bias, Separate):
            weight = self._stacked(step.weight)
            bias = self._stacked(step.bias) if step.bias else None
            arguments = (x, weight, self.offsets, bias, step.transposed)
            return self.make.call(_glue.grouped_linear.default, *arguments)
        weights = self._separate(step.weight)
        biases = self._separate(step.bias) if step.bias else []
        return self.make.call(_glue.grouped_linear_list.default, x, weights, self.offsets, biases, step.transposed)

    def _separate(self, values: PerExpert) -> list[fx.Node]:
        if isinstance(values, Separate):
            return list(values.nodes)
        parts = self.make.method("unbind", self._stacked(values), 0)
        return [self.make.call(operator.getitem, parts, i) for i in range(self.loop.num_experts)]

    def _stacked(self, values: PerExpert) -> fx.Node:
        """One tensor ``[E, ...]``."""
        if isinstance(values, Separate):
            return self._once(values, lambda: self.make.call(torch.stack, list(values.nodes)))
        base, count = values.base, self.loop.num_experts
        if value_of(base).shape[0] == count:
            return base
        return self._once(values, lambda: self.make.method("narrow", base, 0, self.loop.partition.first_expert, count))

    def _once(self, what: Any, write: Callable[[], fx.Node]) -> fx.Node:
        if what not in self.written:
            self.written[what] = write()
        return self.written[what]

    def _argument(self, value: Any) -> Any:
        def written(item: Any) -> Any:
            if isinstance(item, Row):
                return self.results[item.step]
            return self._repeat(item) if isinstance(item, Vector) else item

        return fx.node.map_aggregate(value, written)

    def _repeat(self, vector: Vector) -> fx.Node:
        def write() -> fx.Node:
            width = math.prod(vector.shape)
            values = self._reshaped(self._stacked(vector.values), (width,), first=self.loop.num_experts)
            ordered = self.loop.partition.source if isinstance(self.loop.partition, SortedRows) else self.order
            assert ordered is not None
            rows = self.make.size(ordered, 0)
            repeated = self.make.call(_glue.grouped_repeat.default, values, self.offsets, rows)
            return self._reshaped(repeated, vector.tail)

        return self._once(vector, write)

    def _reshaped(self, node: fx.Node, tail: tuple[Any, ...], first: int = -1) -> fx.Node:
        value = value_of(node)
        if tuple(value.shape[1:]) == tail and value.dim() == len(tail) + 1:
            return node
        return self.make.method("reshape", node, first, *tail)

    def _alternating(self, step: RowWise) -> int | None:
        """0 for ``x[..., ::2]`` and 1 for ``x[..., 1::2]``, of an even number of columns."""
        match self.operators.only_call(step.node) if len(rows_of(step)) == 1 else None:
            case Call(torch.ops.aten.slice, {"self": source, "dim": dim, "start": start, "end": end, "step": 2}):
                meta = self.operators.meta(source)
                width = meta.shape[-1]
                whole = type(width) is int and not width % 2 and (end is None or (type(end) is int and end >= width))
                start = 0 if start is None else start
                return start if whole and dim in (-1, meta.rank - 1) and start in (0, 1) else None
        return None

    def _check(self, result: fx.Node, step: Step) -> None:
        """The grouped form must have the dtype and row sizes of what it stands for."""
        got, wanted = value_of(result), value_of(step.node)
        if isinstance(wanted, torch.Tensor) and (got.dtype, tuple(got.shape[1:])) != (wanted.dtype, step.tail):
            raise LeftAlone(
                f"'{step.node.name}' of all experts would be {got.dtype} with rows of {tuple(got.shape[1:])}, not "
                f"{wanted.dtype} with rows of {step.tail}",
                step.node,
            )
