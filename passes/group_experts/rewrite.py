"""Writes a loop that was proved to be one grouped computation as one."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler import compat
from glue_compiler.errors import GlueInvariantError
from glue_compiler.expert_capture import HITS, SpeculativeRegion
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.values import requires_grad, value_of
from glue_compiler.passes.group_experts.analysis import ExpertLoop
from glue_compiler.passes.group_experts.expert_bodies import (
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
)

_glue = torch.ops.glue
_MULTIPLY = {torch.mul, operator.mul, "mul", "__mul__", "multiply"}
_CAST = {"to", "float", "type_as"}


def group(gm: fx.GraphModule, loop: ExpertLoop, analysis: EffectAnalysis) -> None:
    """Write the grouped form where the last expert adds its rows, and erase the loop."""
    emit = _Emitter(gm, loop, analysis)
    accumulator = loop.accumulator
    with gm.graph.inserting_before(loop.last):
        combined = _Grouped(emit, loop).write()
        if loop.starts_at_zero:
            result = combined
        else:
            result = gm.graph.call_method("add_" if loop.in_place else "add", (accumulator, combined))
            result.meta.update(emit.meta, example_value=value_of(accumulator if loop.in_place else loop.last))
    for sink in reversed(loop.sinks):
        sink.node.replace_all_uses_with(accumulator if loop.in_place and sink.node is not loop.last else result)
        gm.graph.erase_node(sink.node)
    if loop.starts_at_zero and loop.in_place:
        accumulator.replace_all_uses_with(result)
        gm.graph.erase_node(accumulator)
    for node in reversed(gm.graph.nodes):
        if node in loop.absorbed and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()


def erase_dead_counts(gm: fx.GraphModule, proved: Collection[SpeculativeRegion]) -> None:
    """Erase the vectors of hit experts that only the loops over them used, with what they were counted from."""
    for hits in [node for node in gm.graph.nodes if node.meta.get(HITS) in proved]:
        waiting = [hits]
        # Sizes of the nonzero, and the checks that it has between no and all rows.
        for node in waiting:
            waiting += [user for user in node.users if user not in waiting]
        if all(_is_check_of_size(node, hits) for node in waiting[1:]):
            counts = hits.args[0]
            for node in sorted(waiting, reverse=True):
                gm.graph.erase_node(node)
            _erase_unused(gm, counts)
    gm.recompile()


def _is_check_of_size(node: fx.Node, hits: fx.Node) -> bool:
    """The size of a nonzero, or a check that it lies between zero and the number of elements."""
    if node.target is torch.ops.aten._assert_scalar.default:
        return True
    if node.target in (operator.ge, operator.le):
        elements = value_of(hits.args[0]).numel()  # type: ignore[arg-type]
        bound = node.args[1]
        return isinstance(bound, int) and (bound <= 0 if node.target is operator.ge else bound >= elements)
    return node.target is torch.ops.aten.sym_size.int


def _erase_unused(gm: fx.GraphModule, node: Any) -> None:
    """The comparison, the sum and the mask behind a vector of hits."""
    while isinstance(node, fx.Node) and node.op.startswith("call_") and not node.users:
        source = node.args[0] if node.args else None
        gm.graph.erase_node(node)
        node = source


class _Emitter:
    """Makes nodes together with the fake values of their results."""

    def __init__(self, gm: fx.GraphModule, loop: ExpertLoop, analysis: EffectAnalysis) -> None:
        self.graph = gm.graph
        self.analysis = analysis
        kept = ("stack_trace", "nn_module_stack")
        self.meta = {key: loop.last.meta[key] for key in kept if key in loop.last.meta}
        self.grad = any(requires_grad(value_of(sink.added)) for sink in loop.sinks)
        self.autocast = loop.autocast

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self._made(self.graph.call_function(target, args, kwargs))

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self._made(self.graph.call_method(name, args, kwargs))

    def node(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        return self._made(self.graph.create_node(op, target, args, kwargs))

    def _made(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        fake_mode = self.analysis.fake_mode
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(self.grad))
            for opened in self.autocast:
                modes.enter_context(torch.autocast(*opened.args))  # type: ignore[arg-type]
            modes.enter_context(compat.speculation(fake_mode, getattr(fake_mode, "shape_env", None)))
            if node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta.update(self.meta, example_value=value)
        return node


class _Grouped:
    def __init__(self, emit: _Emitter, loop: ExpertLoop) -> None:
        self.emit = emit
        self.loop = loop
        selected = loop.selected
        if loop.first_expert:
            selected = emit.call(torch.sub, selected, loop.first_expert)
        sort = emit.call(_glue.expert_sort.default, selected, loop.num_experts)
        self.order, self.inverse, _, self.offsets = (emit.call(operator.getitem, sort, i) for i in range(4))
        self.results: dict[int, fx.Node] = {}
        self.stacks: dict[PerExpert, fx.Node] = {}
        self.repeated: dict[Vector, fx.Node] = {}
        self.slot_weights: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.row_count: Any = None

    def write(self) -> fx.Node:
        """Returns ``[tokens, width]``: the sum of each token's rows."""
        end, weights = self._weighted_end()
        needed = self._needed(end)
        for i, step in enumerate(self.loop.steps):
            if i in needed:
                self.results[i] = self._step(step)
        dtype = value_of(self.loop.accumulator).dtype
        scale = self._weights_by_slot(weights) if weights else None
        # The sum over slots is taken in fp32 and rounded once, which the loop did after each expert.
        arguments = (self.results[end], self.order, self.inverse, self.offsets, self.loop.top_k, scale, dtype)
        return self.emit.call(_glue.expert_combine.default, *arguments)

    def _weighted_end(self) -> tuple[int, SlotWeight | None]:
        """(step whose rows are combined, weights): a last multiplication by the slots' weights is left to the sum."""
        steps = self.loop.steps
        last = len(steps) - 1
        step = steps[last]
        used = [sum(row.step == i for other in steps for row in _rows_of(other)) for i in range(len(steps))]
        if isinstance(step, RowWise) and step.target in _CAST and isinstance(step.args[0], Row):
            last = step.args[0].step
            step = steps[last]
        if isinstance(step, RowWise) and step.target in _MULTIPLY and len(step.args) == 2 and not step.kwargs:
            for rows, factor in (step.args, step.args[::-1]):
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

    def _needed(self, end: int) -> set[int]:
        """The steps that step ``end`` is computed from, and itself."""
        needed = {end}
        for i in range(end, -1, -1):
            if i in needed:
                needed.update(row.step for row in _rows_of(self.loop.steps[i]))
        return needed

    # -- steps

    def _step(self, step: Step) -> fx.Node:
        result = self._write_step(step)
        self._check(result, step)
        return result

    def _write_step(self, step: Step) -> fx.Node:
        if isinstance(step, Gather):
            arguments = (step.source, self.order, self.inverse, self.offsets, self.loop.top_k)
            return self.emit.call(_glue.expert_gather.default, *arguments)
        if isinstance(step, SlotWeight):
            flat = self.emit.method("reshape", self._weights_by_slot(step), -1, 1)
            # One "token" per slot: the row of slot s is row s of the flat weights.
            rows = self.emit.call(_glue.expert_gather.default, flat, self.order, self.inverse, self.offsets, 1)
            return self._reshaped(rows, step.tail)
        if isinstance(step, Reshape):
            return self._reshaped(self.results[step.row.step], step.tail)
        if isinstance(step, Product):
            return self._product(step)
        assert isinstance(step, RowWise)
        return self.emit.node(step.node.op, step.target, self._argument(step.args), self._argument(step.kwargs))

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
        return [self.emit.call(operator.getitem, parts, i) for i in range(self.loop.num_experts)]

    def _stacked(self, values: PerExpert) -> fx.Node:
        """One tensor ``[E, ...]``."""
        if values not in self.stacks:
            if isinstance(values, Separate):
                self.stacks[values] = self.emit.call(torch.stack, list(values.nodes))
            elif value_of(values.base).shape[0] == self.loop.num_experts:
                self.stacks[values] = values.base
            else:
                first, count = self.loop.first_expert, self.loop.num_experts
                self.stacks[values] = self.emit.method("narrow", values.base, 0, first, count)
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
            values = self._reshaped(self._stacked(vector.values), (width,), first=self.loop.num_experts)
            if self.row_count is None:
                rows = value_of(self.order).shape[0]
                symbolic = isinstance(rows, torch.SymInt)
                self.row_count = self.emit.call(torch.ops.aten.sym_size.int, self.order, 0) if symbolic else rows
            self.repeated[vector] = self.emit.call(_glue.grouped_repeat.default, values, self.offsets, self.row_count)
        return self.repeated[vector]

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

    def _reshaped(self, node: fx.Node, tail: tuple[Any, ...], first: int = -1) -> fx.Node:
        value = value_of(node)
        if tuple(value.shape[1:]) == tail and value.dim() == len(tail) + 1:
            return node
        return self.emit.method("reshape", node, first, *tail)

    def _check(self, result: fx.Node, step: Step) -> None:
        """The grouped form must have the dtype and row sizes of what it stands for."""
        got, wanted = value_of(result), value_of(step.node)
        if isinstance(wanted, torch.Tensor) and (got.dtype, tuple(got.shape[1:])) != (wanted.dtype, step.tail):
            raise GlueInvariantError(
                f"group_experts wrote '{step.node.name}', {wanted.dtype} with rows of {step.tail}, as {got.dtype} with "
                f"rows of {tuple(got.shape[1:])}"
            )


def _rows_of(step: Step) -> list[Row]:
    """The results of earlier steps that a step takes, as often as it takes them."""
    found: list[Row] = []

    def look(value: Any) -> None:
        if isinstance(value, Row):
            found.append(value)
        elif isinstance(value, tuple | list):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            look(list(value.values()))

    look([getattr(step, name) for name in ("args", "kwargs", "row", "x") if hasattr(step, name)])
    return found
