"""Branches on what a batch of integers says, such as "is this batch packed?", without a graph break.

Dynamo ends a graph where Python code branches on a tensor's value. Where the condition is a pure function of one
integer input, it is evaluated for the call that is being traced, and the branch that this call takes is traced. A guard
evaluates it again in each later call, so a call that would take the other branch gets code of its own. Eager code
reads the condition at each branch; the guard reads it once a call, whatever the number of layers that ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.compat import branch_guards, fake_mode_of
from glue_compiler.fx.bodies import is_higher_order
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.values import Symbolic, expression, is_plain, tensors_in, unbacked_in, value_of

MOST_GUARDS = 2
"""Conditions of one graph that become guards: each doubles the variants that a frame may be compiled to."""
MOST_OPERATORS = 32
"""Operators of one condition: it runs in each call."""

_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


@dataclass(frozen=True)
class Condition:
    """A pure function of one integer input of the traced graph, or of the sizes of one input, or of nothing.

    Attributes:
        source: where Dynamo finds the input; None: there is none. example: the input of the call that is being traced.
        sizes: of the input, None where they may vary.
        function: of the input alone.
        key: equal for conditions of the same operators on the same input.
    """

    source: Any | None
    example: torch.Tensor | None
    sizes: tuple[int | None, ...]
    function: fx.GraphModule
    key: Any

    def holds(self, tensor: torch.Tensor | None) -> bool:
        with branch_guards.outside_of_tracing():
            return bool(self.function.forward(tensor))

    def guard(self, expected: bool) -> Callable[[Any], bool]:
        assert self.example is not None
        known = self.example.dtype, self.example.device

        def check(value: Any) -> bool:
            # Torch's own guards, for the shape too, may come after this one.
            if not isinstance(value, torch.Tensor) or (value.dtype, value.device) != known:
                return False
            if len(value.shape) != len(self.sizes):
                return False
            if any(size not in (None, other) for size, other in zip(self.sizes, value.shape, strict=True)):
                return False
            return self.holds(value) == expected

        return check


@dataclass
class GuardedBranches(compat.TracingObserver):
    """The decisions for one graph that is being traced."""

    _output: Any = None
    _decided: dict[Any, bool] = field(default_factory=dict)

    def decide(self, frame: Any, at: int | None, node: fx.Node, expression: Any) -> bool | None:
        if not branch_guards.BRANCHES.is_available() or (at is not None and compat.is_assertion(frame, at)):
            return None
        if frame.output is not self._output:  # Dynamo starts again after a failed speculation
            self._output, self._decided = frame.output, {}
        condition = condition_of(frame, node)
        if condition is None:
            return None
        if condition.key not in self._decided:
            if len(self._decided) == MOST_GUARDS:
                return None
            value = condition.holds(condition.example)
            if condition.source is not None:
                text = f"glue: what the code asks about the contents of {condition.source.name} is {value}"
                branch_guards.install_guard(condition.source, condition.guard(value), text)
            self._decided[condition.key] = value
        return self._decided[condition.key]


def condition_of(frame: Any, node: fx.Node) -> Condition | None:
    """The condition that ``node`` computes; None if it is not a boolean and a pure function of one integer input."""
    if not _is_one_boolean(node):
        return None
    operators = _operators_behind(frame, node)
    if operators is None:
        return None
    operands = {_origin(frame, operand) for each in operators for operand in each.all_input_nodes} - set(operators)
    tensors = [operand for operand in operands if isinstance(value_of(operand), torch.Tensor)]
    symbols = operands - set(tensors)
    if len(tensors) > 1 or not _is_as_passed(frame):
        return None
    if tensors and (value_of(tensors[0]).dtype not in _INTEGERS or not is_plain(value_of(tensors[0]))):
        return None
    if not operands:
        function, key = _as_function(frame, operators, None, {})
        return Condition(None, None, (), function, key)
    for anchor in tensors or branch_guards.inputs_of(frame):
        sizes = {symbol: _size_of(anchor, symbol) for symbol in symbols}
        found = branch_guards.input_of(anchor)
        if found is not None and None not in sizes.values():
            source, example = found
            function, key = _as_function(frame, operators, anchor, sizes)
            shape = tuple(size if isinstance(size, int) else None for size in value_of(anchor).shape)
            return Condition(source, example, shape, function, (source.name, *key))
    return None


def _is_one_boolean(node: fx.Node) -> bool:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.bool and value.dim() == 0
    if not isinstance(value, torch.SymBool):
        return False
    while isinstance(value_of(node), Symbolic) and node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    read = node.args[0] if node.target == "item" else None
    return isinstance(read, fx.Node) and isinstance(value_of(read), torch.Tensor) and value_of(read).dtype == torch.bool


def _origin(frame: Any, node: fx.Node) -> fx.Node:
    """The node that computes what a placeholder of a body stands for."""
    while node.op == "placeholder":
        outer = branch_guards.outer_node(frame, node)
        if outer is None:
            return node
        node = outer
    return node


def _operators_behind(frame: Any, node: fx.Node) -> list[fx.Node] | None:
    """What computes ``node`` from inputs, operands first; None if anything else than its operands could change it."""
    effects: EffectAnalysis | None = None
    ordered: list[fx.Node] = []
    seen: set[fx.Node] = set()
    waiting = [(_origin(frame, node), False)]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            ordered.append(node)
            continue
        if node in seen or node.op == "placeholder" or _is_size(node):
            continue
        seen.add(node)
        if not node.op.startswith("call_") or node.op == "call_module" or is_higher_order(node):
            return None
        if effects is None:
            effects = EffectAnalysis(fake_mode_of(tensors_in([value_of(node), *map(value_of, node.all_input_nodes)])))
        found = effects.of(None, node)  # of integers, which no autocast changes
        tensors = tensors_in(value_of(node))
        if found.kind is not Kind.PURE or any(_is_written(t) or unbacked_in(t) for t in tensors):
            return None
        if len(seen) > MOST_OPERATORS:
            return None
        waiting.append((node, True))
        waiting += [(_origin(frame, operand), False) for operand in node.all_input_nodes]
    return ordered


def _is_size(node: fx.Node) -> bool:
    """A number that is known from the inputs' sizes."""
    return isinstance(value_of(node), torch.SymInt) and not unbacked_in(value_of(node))


def _is_written(tensor: torch.Tensor) -> bool:
    return tensor._version > 0


def _is_as_passed(frame: Any) -> bool:
    """No integer input has been written yet: the guard sees inputs as they come, and any of them may share memory."""
    tensors = tensors_in([value_of(node) for node in branch_guards.inputs_of(frame)])
    return not any(_is_written(tensor) for tensor in tensors if tensor.dtype in _INTEGERS)


def _size_of(anchor: fx.Node, symbol: fx.Node) -> int | None:
    """The dimension of ``anchor`` whose size ``symbol`` is."""
    value = value_of(symbol)
    if not isinstance(value, torch.SymInt) or not isinstance(value_of(anchor), torch.Tensor):
        return None
    sizes = [expression(size) for size in value_of(anchor).shape]
    return sizes.index(expression(value)) if expression(value) in sizes else None


def _as_function(
    frame: Any, operators: list[fx.Node], anchor: fx.Node | None, sizes: dict[fx.Node, int | None]
) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    graph = fx.Graph()
    given = graph.placeholder("given")
    copies: dict[fx.Node, fx.Node] = {} if anchor is None else {anchor: given}
    key: list[Any] = []
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
    graph.output(copies[operators[-1]])
    return fx.GraphModule(torch.nn.Module(), graph), tuple(key)
