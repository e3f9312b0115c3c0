"""Reads loops of equal steps, of which capture has traced two (``capture/counted_loops.py``)."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.capture.counted_loops import HELD, STEP, TRACED, CountedLoop
from glue_compiler.capture.regions import REGIONS
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.flow import Refused
from glue_compiler.fx.reachable import reachable
from glue_compiler.fx.values import (
    expression,
    expressions,
    is_plain,
    keeps_layout,
    own_storages,
    storage_of,
    storages_of,
    tensors_in,
    value_of,
    values_of,
)


class Number:
    """Stands for the number of the step in the arguments of its nodes."""


NUMBER = Number()


@dataclass(frozen=True)
class State:
    """A value that a step makes of its own or hands on: ``first`` in step 0, and ``second`` in step 1.

    Of memory that steps write to, both are the node that made it.
    """

    first: fx.Node
    second: fx.Node


@dataclass
class EqualSteps:
    """What all steps from 1 on do.

    Attributes:
        autocast: the arguments of the regions that they run in.
        count: how many steps there are, an int or where to read it: a tensor and the dimension of that size.
        arguments: of the nodes of step 1, with ``NUMBER``. Nodes of step 0 in them stand for what the step before made.
        fixed: other values that steps read.
        needed: the nodes of step 1 that compute what is used after the loop.
    """

    loop: CountedLoop
    first: list[fx.Node]
    second: list[fx.Node]
    count: int | tuple[fx.Node, int] = 0
    arguments: dict[fx.Node, Any] = field(default_factory=dict)
    autocast: tuple[tuple[Any, ...], ...] = ()
    states: list[State] = field(default_factory=list)
    fixed: list[fx.Node] = field(default_factory=list)
    needed: set[fx.Node] = field(default_factory=set)


def loops_in(gm: fx.GraphModule) -> Iterator[EqualSteps]:
    """The candidates in one graph, before anything is proved."""
    steps: dict[CountedLoop, tuple[list[fx.Node], ...]] = defaultdict(lambda: tuple([] for _ in range(TRACED)))
    for node in gm.graph.nodes:
        for region in node.meta.get(REGIONS, ()):
            if isinstance(region, CountedLoop):
                steps[region][node.meta[STEP]].append(node)
    for loop, (first, second) in steps.items():
        yield EqualSteps(loop, first, second)


def read(gm: fx.GraphModule, steps: EqualSteps, effects: EffectAnalysis) -> None:
    """Prove that all steps from 1 on are equal, and fill in what they do.

    Raises:
        Refused: with the reason.
    """
    if steps.loop.harm is not None:
        raise Refused(steps.loop.harm)
    if len(steps.first) != len(steps.second):
        raise Refused("its first two steps do not run the same operators")
    matching = _Matching(steps)
    for first, second in zip(steps.first, steps.second, strict=True):
        matching.add(first, second)
    steps.fixed = list(matching.fixed)
    written = _written(gm, steps, effects)
    _check_names(gm, steps, matching)
    _check_order(gm, steps)
    used = [node for node in steps.second if any(user not in matching.second for user in node.users)]
    steps.needed = _needed(steps, matching, used)
    image = {second: first for first, second in matching.image.items()}
    carried = (first for first in matching.carried if matching.image[first] in steps.needed)
    firsts = dict.fromkeys([*carried, *(image[node] for node in used)])
    steps.states = [State(node, matching.image[node]) for node in firsts]
    _check_states(steps)
    steps.states += [State(node, node) for node in written]
    read_by_needed = {each for node in steps.needed for each in node.all_input_nodes}
    steps.fixed = [node for node in steps.fixed if node not in written and node in read_by_needed]
    steps.count = _count(steps)


class _Matching:
    """Compares step 1 with step 0, node by node."""

    def __init__(self, steps: EqualSteps) -> None:
        self.first, self.second = set(steps.first), set(steps.second)
        self.arguments = steps.arguments
        self.image: dict[fx.Node, fx.Node] = {}
        self.carried: dict[fx.Node, fx.Node] = {}
        """Nodes of step 0 that step 1 reads → what step 0 reads there."""
        self.fixed: dict[fx.Node, None] = {}

    def add(self, first: fx.Node, second: fx.Node) -> None:
        if (first.op, first.target) != (second.op, second.target) or first.op == "get_attr":
            raise Refused("its first two steps do not run the same operators")
        if len(first.meta.get(REGIONS, ())) != 1:
            raise Refused("a loop or a branch that is traced for all experts is inside")
        is_indexing = first.target in (operator.getitem, operator.setitem) and isinstance(first.args[1], tuple)
        if is_indexing:
            (indexed, at, *value), (other, other_at, *others) = first.args, second.args
            if not isinstance(at, tuple) or not isinstance(other_at, tuple) or len(at) != len(other_at):
                raise Refused("its first two steps have other arguments")
            indices = tuple(self._index(*each) for each in zip(at, other_at, strict=True))
            args = (self.same(indexed, other), indices, *(self.same(*each) for each in zip(value, others, strict=True)))
        else:
            args = self.same(first.args, second.args)
        self.arguments[second] = args, self.same(first.kwargs, second.kwargs)
        self.image[first] = second

    def _index(self, first: Any, second: Any) -> Any:
        return NUMBER if (type(first), first, type(second), second) == (int, 0, int, 1) else self.same(first, second)

    def same(self, first: Any, second: Any) -> Any:
        """``second``, as an argument of every step."""
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            return self._node(first, second)
        if type(first) is type(second):
            if isinstance(first, tuple | list) and len(first) == len(second):
                return type(second)(self.same(a, b) for a, b in zip(first, second, strict=True))
            if isinstance(first, dict) and list(first) == list(second):
                return {key: self.same(first[key], second[key]) for key in first}
            if isinstance(first, slice):
                parts = ("start", "stop", "step")
                return slice(*(self.same(getattr(first, part), getattr(second, part)) for part in parts))
            if not isinstance(first, tuple | list | dict) and repr(first) == repr(second):
                return second
        raise Refused("its first two steps have other arguments")

    def _node(self, first: fx.Node, second: fx.Node) -> fx.Node:
        if first in self.first or second in self.second:
            if self.image.get(first) is not second:
                raise Refused("its first two steps have other arguments")
        elif second in self.first:
            if self.carried.setdefault(second, first) is not first:
                raise Refused("a value of one step stands for two of the next")
        elif first is second:
            self.fixed[second] = None
        else:
            raise Refused("its first two steps have other arguments")
        return second


def _needed(steps: EqualSteps, matching: _Matching, used: list[fx.Node]) -> set[fx.Node]:
    """A state that nothing reads has no part in gradients: zeros times what is not finite would be NaN."""

    def operands(node: fx.Node) -> list[fx.Node]:
        given = (matching.image.get(each, each) for each in node.all_input_nodes)
        return [each for each in given if each in matching.second]

    return reachable([*used, *(node for node in steps.second if node.target is operator.setitem)], operands)


def _written(gm: fx.GraphModule, steps: EqualSteps, effects: EffectAnalysis) -> list[fx.Node]:
    """Memory that steps write items of and do not read: made in this graph, and known by its one node until then."""
    modes = {effects.mode_of(gm, node) for node in (*steps.first, *steps.second)}
    tensors = tensors_in(values_of((*steps.second, *steps.fixed)))
    if len(modes) > 1 or not all(mode.is_known for mode in modes):
        raise Refused("it runs in several modes")
    devices = sorted({each.device.type for each in tensors})
    around = ((each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each), False) for each in devices)
    steps.autocast = (*around, *modes.pop().autocast)
    if not all(map(is_plain, tensors)):
        raise Refused("a tensor subclass is computed with")
    found: dict[fx.Node, None] = {}
    for node in (*steps.first, *steps.second):
        done = effects.of(gm, node)
        if done.kind is Kind.PURE and not done.writes:
            continue
        target = node.args[0] if node.target is operator.setitem else None
        if not isinstance(target, fx.Node) or target not in steps.fixed or done.random or done.syncs:
            raise Refused(f"'{node.name}' is no operator on values of its own")
        if done.writes != storages_of(value_of(target)):
            raise Refused(f"'{node.name}' is no operator on values of its own")
        found[target] = None
    for node in found:
        _check_memory(gm, node, steps)
    return list(found)


def _check_memory(gm: fx.GraphModule, made: fx.Node, steps: EqualSteps) -> None:
    storage = storage_of(value_of(made))
    if made.op not in ("call_function", "call_method") or storage not in own_storages(made):
        raise Refused("it writes to memory that others may hold")
    if not keeps_layout(value_of(made)):
        raise Refused("what it writes to is not dense")
    inside, seen = {*steps.first, *steps.second}, False
    for node in gm.graph.nodes:
        seen = seen or node is made
        if node is steps.second[-1]:
            return
        if node is made or not seen:
            continue
        if node in inside:
            operands = [*node.args[1:], *node.kwargs.values()]
            reads = made in node.all_input_nodes and (node.target is not operator.setitem or made in operands)
            if reads or (made in node.args and node.args[0] is not made):
                raise Refused("a step reads memory that steps write to")
        elif storage in storages_of(value_of(node)) or made in node.all_input_nodes:
            raise Refused("what it writes to is used before it ends")


def _check_names(gm: fx.GraphModule, steps: EqualSteps, matching: _Matching) -> None:
    """What local names hold after a step is made by the same node of each step, or is the same for all."""
    held: dict[str, dict[int, fx.Node]] = defaultdict(dict)
    for node in gm.graph.nodes:
        for loop, step, name in node.meta.get(HELD, ()):
            if loop is steps.loop:
                held[name][step] = node
    known = set()
    for name, nodes in held.items():
        before, first, second = (nodes.get(step) for step in range(TRACED + 1))
        if first is None or second is None:
            raise Refused(f"'{name}' does not hold a tensor after each step")
        if first in matching.first and matching.image[first] is second:
            known |= {first, second}
        elif not (before is first is second):
            raise Refused(f"'{name}' holds what an earlier step has made")
    if not known >= matching.carried.keys():
        raise Refused("a step reads what the step before has made, and no local name holds")
    for node in steps.first:
        if any(user not in matching.first and user not in matching.second for user in node.users):
            raise Refused(f"'{node.name}' of each step is used after the loop")
    for node in steps.second:
        if node not in known and any(user not in matching.second for user in node.users):
            raise Refused(f"'{node.name}' of each step is used after the loop")


def _check_order(gm: fx.GraphModule, steps: EqualSteps) -> None:
    """The steps become one node before the second."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    if any(place[node] > place[steps.second[0]] for node in (*steps.first, *steps.fixed)):
        raise Refused("a value that it reads is made inside of it")
    if any(not isinstance(value_of(node), torch.Tensor | torch.SymInt | int) for node in steps.fixed):
        raise Refused("it reads a value that is neither a tensor nor a size")


def _check_states(steps: EqualSteps) -> None:
    """All steps hand on tensors of one kind, in memory of their own."""
    others = set[int]().union(*(storages_of(value_of(node)) for node in steps.fixed))
    for state in steps.states:
        first, second = value_of(state.first), value_of(state.second)
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor) or _kind(first) != _kind(second):
            raise Refused(f"'{state.second.name}' is of another kind in each step")
        if not keeps_layout(second) or storage_of(second) in others:
            raise Refused(f"'{state.second.name}' is a view")
        others.add(storage_of(second))


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    numbers = expressions((*tensor.shape, *tensor.stride()))
    return numbers, tensor.dtype, tensor.device, tensor.requires_grad


def _count(steps: EqualSteps) -> int | tuple[fx.Node, int]:
    """A size that is counted is that of a dimension that steps index."""
    if isinstance(steps.loop.count, int):
        return steps.loop.count
    for node, (args, _) in steps.arguments.items():
        indexed = node.args[0]
        if node.target not in (operator.getitem, operator.setitem) or not isinstance(args[1], tuple):
            continue
        if NUMBER not in args[1] or indexed in steps.second or indexed in steps.first:
            continue
        at = args[1].index(NUMBER)
        sizes = value_of(indexed).shape  # type: ignore[arg-type]
        is_plain_index = all(isinstance(each, slice | int | Number) for each in args[1][: at + 1])
        if is_plain_index and expression(sizes[at]) == expression(steps.loop.count):
            return indexed, at  # type: ignore[return-value]
    raise Refused("its number of steps is no size of what it indexes")
