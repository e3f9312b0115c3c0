"""Writes the steps of a body for the rows of all experts at once."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler import compat
from glue_compiler.compat.operator_calls import call_of
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.operators import Call, Operators
from glue_compiler.fx.values import requires_grad, storages_of, value_of
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


class Emitter:
    """Makes nodes together with the fake values of their results.

    Args:
        replaced: what the nodes stand for; the last one's source is theirs.
        autocast: the nodes that open the autocast regions around them.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        replaced: Sequence[fx.Node],
        analysis: EffectAnalysis,
        autocast: tuple[fx.Node, ...] = (),
    ) -> None:
        self.graph = gm.graph
        self.analysis = analysis
        kept = ("stack_trace", "nn_module_stack")
        self.meta = {key: replaced[-1].meta[key] for key in kept if key in replaced[-1].meta}
        self.grad = any(requires_grad(value_of(node)) for node in replaced)
        self.autocast = autocast

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._made(self.graph.call_function(target, args, kwargs))

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self._made(self.graph.call_method(name, args, kwargs))

    def node(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        return self._made(self.graph.create_node(op, target, args, kwargs))

    def size(self, tensor: fx.Node, dim: int) -> Any:
        """An int, or a node of one."""
        size = value_of(tensor).shape[dim]
        return self.call(torch.ops.aten.sym_size.int, tensor, dim) if isinstance(size, torch.SymInt) else size

    def _made(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        fake_mode = self.analysis.fake_mode
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(self.grad))
            for opened in self.autocast:
                modes.enter_context(torch.autocast(*opened.args))  # type: ignore[arg-type]
            modes.enter_context(compat.speculation(fake_mode, getattr(fake_mode, "shape_env", None)))
            value = call_of(node, args, kwargs)
        node.meta.update(self.meta, example_value=value)
        return node


def after(node: fx.Node) -> fx.Node:
    """Where what reads ``node`` as it is made may stand; inputs come first."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def saved_weights(emit: Emitter, operators: Operators, weights: fx.Node, at: fx.Node) -> fx.Node:
    """What is replaced saves weights for backward in the order of the rows, copies: they may be written afterwards."""
    is_private = operators.numbering.is_private_after(storages_of(value_of(weights)), at)
    return weights if is_private or not emit.grad else emit.call(_glue.private_copy.default, weights)


class GroupedBody:
    """Writes the steps of a loop for the rows of all experts, in the order of the experts.

    Args:
        offsets: where each expert's rows end.
        order: the slot of each row, and
        inverse: the row of each slot; None where the rows stand in order already.
    """

    def __init__(
        self,
        emit: Emitter,
        operators: Operators,
        loop: GroupedLoop,
        offsets: fx.Node,
        order: fx.Node | None = None,
        inverse: fx.Node | None = None,
    ) -> None:
        self.emit = emit
        self.operators = operators
        self.partition = loop.partition
        self.steps = loop.steps
        self.num_experts = loop.partition.num_experts
        self.first_expert = loop.partition.first_expert
        self.offsets = offsets
        self.order = order
        self.inverse = inverse
        self.results: dict[int, fx.Node] = {}
        self.stacks: dict[PerExpert, fx.Node] = {}
        self.repeated: dict[Vector, fx.Node] = {}
        self.halves: dict[Row, fx.Node] = {}
        self.slot_weights: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.row_count: Any = None

    def compute(self, end: int) -> fx.Node:
        """Write step ``end`` with all that it is computed from."""
        needed = self._needed(end)
        for i, step in enumerate(self.steps):
            if i in needed:
                self.results[i] = self._step(step)
        return self.results[end]

    def _needed(self, end: int) -> set[int]:
        """The steps that step ``end`` is computed from, and itself."""
        needed = {end}
        for i in range(end, -1, -1):
            if i in needed:
                needed.update(row.step for row in rows_of(self.steps[i]))
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
            return self.emit.node(step.op, step.target, self._argument(step.args), self._argument(step.kwargs))
        if isinstance(step, AllRows):
            return step.source
        if isinstance(step, Gather):
            assert isinstance(self.partition, RoutedRows)
            return self._gathered(step.source, self.partition.top_k)
        assert isinstance(step, SlotWeight)
        # One "token" per slot: the row of slot s is row s of the flat weights.
        flat = self.emit.method("reshape", self.weights_by_slot(step), -1, 1)
        return self._reshaped(self._gathered(flat, 1), step.tail)

    def _gathered(self, source: fx.Node, top_k: int) -> fx.Node:
        return self.emit.call(_glue.expert_gather.default, source, self.order, self.inverse, self.offsets, top_k)

    def weights_by_slot(self, step: SlotWeight) -> fx.Node:
        """``[tokens, top_k]``, or ``[tokens]`` for one slot."""
        rows, key = self.partition, (step.source, step.by_expert)
        assert isinstance(rows, RoutedRows)
        if key not in self.slot_weights:
            source = step.source
            if step.by_expert:
                selected = rows.selected
                if value_of(selected).dtype != torch.int64:
                    selected = self.emit.method("to", selected, torch.int64)
                if value_of(selected).dim() == 1:
                    selected = self.emit.method("unsqueeze", selected, 1)
                # A slot that selects no expert has no column; its weight is not used.
                first, count = rows.first_expert, rows.num_experts
                selected = self.emit.method("clamp", selected, first, first + count - 1)
                source = self.emit.call(torch.gather, source, 1, selected)
            elif value_of(source).dim() == 1 and rows.top_k > 1:
                source = self.emit.method("unsqueeze", source, 1)
                source = self.emit.method("expand", source, -1, rows.top_k)
            self.slot_weights[key] = source
        return self.slot_weights[key]

    def _half(self, step: RowWise) -> fx.Node | None:
        """``x[..., ::2]`` or ``x[..., 1::2]``, where the body takes both of one ``x``."""
        which = self._alternating(step)
        if which is None or not any(
            isinstance(other, RowWise) and self._alternating(other) == 1 - which and rows_of(other) == rows_of(step)
            for other in self.steps
        ):
            return None
        (row,) = rows_of(step)
        if row not in self.halves:
            self.halves[row] = self.emit.call(_glue.deinterleave.default, self.results[row.step])
        return self.emit.call(operator.getitem, self.halves[row], which)

    def _product(self, step: Product) -> fx.Node:
        x = self.results[step.x.step]
        if isinstance(step.weight, Stacked) and not isinstance(step.bias, Separate):
            weight = self._stacked(step.weight)
            bias = self._stacked(step.bias) if step.bias else None
            arguments = (x, weight, self.offsets, bias, step.transposed)
            return self.emit.call(_glue.grouped_linear.default, *arguments)
        weights = self._separate(step.weight)
        biases = self._separate(step.bias) if step.bias else []
        return self.emit.call(_glue.grouped_linear_list.default, x, weights, self.offsets, biases, step.transposed)

    def _separate(self, values: PerExpert) -> list[fx.Node]:
        if isinstance(values, Separate):
            return list(values.nodes)
        parts = self.emit.method("unbind", self._stacked(values), 0)
        return [self.emit.call(operator.getitem, parts, i) for i in range(self.num_experts)]

    def _stacked(self, values: PerExpert) -> fx.Node:
        """One tensor ``[E, ...]``."""
        if values not in self.stacks:
            if isinstance(values, Separate):
                self.stacks[values] = self.emit.call(torch.stack, list(values.nodes))
            elif value_of(values.base).shape[0] == self.num_experts:
                self.stacks[values] = values.base
            else:
                self.stacks[values] = self.emit.method("narrow", values.base, 0, self.first_expert, self.num_experts)
        return self.stacks[values]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Row):
            return self.results[value.step]
        if isinstance(value, Vector):
            return self._repeat(value)
        if isinstance(value, tuple | list):
            items = [self._argument(item) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(part) for part in (value.start, value.stop, value.step)))
        return value

    def _repeat(self, vector: Vector) -> fx.Node:
        if vector not in self.repeated:
            width = math.prod(vector.shape)
            values = self._reshaped(self._stacked(vector.values), (width,), first=self.num_experts)
            if self.row_count is None:
                ordered = self.partition.source if isinstance(self.partition, SortedRows) else self.order
                assert ordered is not None
                self.row_count = self.emit.size(ordered, 0)
            repeated = self.emit.call(_glue.grouped_repeat.default, values, self.offsets, self.row_count)
            self.repeated[vector] = self._reshaped(repeated, vector.tail)
        return self.repeated[vector]

    def _reshaped(self, node: fx.Node, tail: tuple[Any, ...], first: int = -1) -> fx.Node:
        value = value_of(node)
        if tuple(value.shape[1:]) == tail and value.dim() == len(tail) + 1:
            return node
        return self.emit.method("reshape", node, first, *tail)

    def _alternating(self, step: RowWise) -> int | None:
        """0 for ``x[..., ::2]`` and 1 for ``x[..., 1::2]``, of an even number of columns."""
        calls = self.operators.calls(step.node)
        if calls is None or len(calls) != 1 or len(rows_of(step)) != 1:
            return None
        match calls[0]:
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
