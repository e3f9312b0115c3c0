"""What the code that is being traced has computed of one integer input, as a function that a guard can call.

Safe because the function holds nothing but operators that give the same for the same operands, on an input that nobody
has written yet: what it says before a call is what the traced code will compute in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.capture.traced_writes import TracedWrites
from glue_compiler.compat import branch_guards, size_assertions
from glue_compiler.compat.symbols import fake_mode_of, unbacked_symbols
from glue_compiler.fx.bodies import is_higher_order
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.values import (
    expression,
    is_call,
    is_plain,
    makes_tensor,
    storages_of,
    tensors_in,
    unbacked_in,
    value_of,
    values_of,
)

_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


@dataclass(frozen=True)
class Limits:
    """``operators``: how many a function may have; it runs in each call.

    ``data_dependent``: may it compute sizes that depend on the input's contents, and floats, which autocast may round
    otherwise in the traced code than in a guard?
    """

    operators: int
    data_dependent: bool


@dataclass(frozen=True)
class InputFunction:
    """A pure function of one integer input of the traced graph, or of the sizes of one input, or of nothing.

    Holds no tensor: the guard that calls it lives as long as the compiled code.

    Attributes:
        source: where Dynamo finds the input; None: there is none.
        kind: dtype and device of the input. sizes: of the input, None where they may vary.
        function: of the input alone; returns a tuple.
        key: equal for functions of the same operators on the same input.
    """

    source: Any | None
    kind: tuple[torch.dtype, torch.device] | None
    sizes: tuple[int | None, ...]
    function: fx.GraphModule
    key: Any

    def values(self, tensor: torch.Tensor | None) -> tuple[Any, ...]:
        with branch_guards.outside_of_tracing():
            return tuple(self.function.forward(tensor))

    def guard(self, holds: Callable[[tuple[Any, ...]], bool]) -> Callable[[Any], bool]:
        """Is a value an input of this kind, and does what the function makes of it satisfy ``holds``?"""

        def check(value: Any) -> bool:
            # Torch's own guards, for the shape too, may come after this one.
            if not isinstance(value, torch.Tensor) or (value.dtype, value.device) != self.kind:
                return False
            if len(value.shape) != len(self.sizes):
                return False
            if any(size not in (None, other) for size, other in zip(self.sizes, value.shape, strict=True)):
                return False
            return holds(self.values(value))

        return check


def input_function(
    frame: Any, nodes: Sequence[fx.Node], limits: Limits, writes: TracedWrites
) -> tuple[InputFunction, torch.Tensor | None] | None:
    """The function that computes ``nodes``, and the input of the call that is being traced; None if it is not one.

    Args:
        writes: what the frame has written so far.
    """
    operators = _operators_behind(frame, nodes, limits, writes)
    if operators is None:
        return None
    operands = {_origin(frame, operand) for each in operators for operand in each.all_input_nodes} - set(operators)
    tensors = [operand for operand in operands if makes_tensor(operand)]
    sized = operands - set(tensors)
    if len(tensors) > 1 or not _is_as_passed(frame, writes):
        return None
    if tensors and (value_of(tensors[0]).dtype not in _INTEGERS or not is_plain(value_of(tensors[0]))):
        return None
    if not operands:
        function, key = _as_function(frame, nodes, operators, None, {})
        return InputFunction(None, None, (), function, key), None
    for anchor in tensors or branch_guards.inputs_of(frame):
        sizes = {symbol: _size_of(anchor, symbol) for symbol in sized}
        found = branch_guards.input_of(anchor)
        if found is not None and None not in sizes.values():
            source, example = found
            function, key = _as_function(frame, nodes, operators, anchor, sizes)
            shape = tuple(size if isinstance(size, int) else None for size in value_of(anchor).shape)
            return InputFunction(source, (example.dtype, example.device), shape, function, (source.name, *key)), example
    return None


def _origin(frame: Any, node: fx.Node) -> fx.Node:
    """The node that computes what a placeholder of a body stands for."""
    while node.op == "placeholder":
        outer = branch_guards.outer_node(frame, node)
        if outer is None:
            return node
        node = outer
    return node


def _operators_behind(
    frame: Any, nodes: Sequence[fx.Node], limits: Limits, writes: TracedWrites
) -> list[fx.Node] | None:
    """What computes ``nodes`` from inputs, operands first; None if anything else than its operands could change it."""
    effects: EffectAnalysis | None = None
    ordered: list[fx.Node] = []
    seen: set[fx.Node] = set()
    waiting = [(_origin(frame, node), False) for node in reversed(nodes)]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            ordered.append(node)
            continue
        if node in seen or node.op == "placeholder" or _is_size(node):
            continue
        seen.add(node)
        if not is_call(node) or node.op == "call_module" or is_higher_order(node):
            return None
        if effects is None:
            effects = EffectAnalysis(fake_mode_of(tensors_in(values_of((node, *node.all_input_nodes)))))
        found = effects.of(None, node)  # of integers, which no autocast changes
        tensors = tensors_in(value_of(node))
        if found.kind is not Kind.PURE or writes.may_have_written(storages_of(tensors)):
            return None
        if not limits.data_dependent and any(unbacked_in(t) or t.dtype not in _INTEGERS for t in tensors):
            return None
        if len(seen) > limits.operators:
            return None
        waiting.append((node, True))
        waiting += [(_origin(frame, operand), False) for operand in node.all_input_nodes]
    return ordered


def _is_size(node: fx.Node) -> bool:
    """A number that is known from the inputs' sizes."""
    value = value_of(node)
    return isinstance(value, torch.SymInt) and not unbacked_symbols(size_assertions.as_written(value))


def _is_as_passed(frame: Any, writes: TracedWrites) -> bool:
    """No integer input has been written yet: the guard sees inputs as they come, and any of them may share memory."""
    tensors = tensors_in(values_of(branch_guards.inputs_of(frame)))
    return not writes.may_have_written(storages_of([tensor for tensor in tensors if tensor.dtype in _INTEGERS]))


def _size_of(anchor: fx.Node, symbol: fx.Node) -> int | None:
    """The dimension of ``anchor`` whose size ``symbol`` is."""
    value = value_of(symbol)
    if not isinstance(value, torch.SymInt) or not makes_tensor(anchor):
        return None
    sizes = [expression(size) for size in value_of(anchor).shape]
    return sizes.index(expression(value)) if expression(value) in sizes else None


def _as_function(
    frame: Any,
    nodes: Sequence[fx.Node],
    operators: list[fx.Node],
    anchor: fx.Node | None,
    sizes: dict[fx.Node, int | None],
) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    graph = fx.Graph()
    given = graph.placeholder("given")
    copies: dict[fx.Node, fx.Node] = {} if anchor is None else {anchor: given}
    key: list[Any] = [tuple(sizes.values())]
    for symbol, dim in sizes.items():
        copies[symbol] = graph.call_method("size", (given, dim))
    names = {copy: str(i) for i, copy in enumerate(copies.values())}
    for node in operators:
        copy = graph.node_copy(node, lambda operand: copies[_origin(frame, operand)])
        copy.meta = {}  # fake tensors, that would live as long as the guard
        copies[node] = copy
        names[copy] = str(len(names))
        arguments = fx.map_arg((copy.args, copy.kwargs), lambda operand: names[operand])
        key.append((copy.op, copy.target, repr(arguments)))
    graph.output(tuple(copies[_origin(frame, node)] for node in nodes))
    return fx.GraphModule(torch.nn.Module(), graph), tuple(key)
