"""Puts other operators in the place of values, where what every rewrite needs is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from glue_compiler.compat import symbols
from glue_compiler.fx.dead_nodes import erase_dead
from glue_compiler.fx.effects import Kind
from glue_compiler.fx.flow import Flow, Refused, Rules
from glue_compiler.fx.gradient_strides import strides_are_seen
from glue_compiler.fx.gradients import Gradients
from glue_compiler.fx.node_maker import NodeMaker
from glue_compiler.fx.operators import Operators, Value
from glue_compiler.fx.private_nodes import nodes_used_alone
from glue_compiler.fx.value_numbering import number_values
from glue_compiler.fx.values import (
    expressions,
    is_call,
    is_plain,
    leaves,
    requires_grad,
    storages_of,
    value_of,
    values_of,
)
from glue_compiler.pipeline.graph_pass import PassContext, PassResult
from glue_compiler.pipeline.results import Skip

F = TypeVar("F")


class New:
    """A call to write: ``New(torch.ops.aten.mul.Tensor, value, New(torch.exp, other))``.

    Arguments are values of the graph, other new calls, and constants.
    """

    def __init__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.target, self.args, self.kwargs = target, args, kwargs

    def __str__(self) -> str:
        return str(getattr(self.target, "__name__", self.target))

    def values(self) -> Iterator[Value]:
        for each in (*self.args, *self.kwargs.values()):
            if isinstance(each, New):
                yield from each.values()
            elif isinstance(each, Value):
                yield each

    def made(self, call: Callable[..., Any], operand: Callable[[Value], Any]) -> Any:
        """The result of ``call(target, *args, **kwargs)``, inner calls first, with ``operand(value)`` for values."""

        def argument(each: Any) -> Any:
            if isinstance(each, New):
                return each.made(call, operand)
            return operand(each) if isinstance(each, Value) else each

        kwargs = {name: argument(each) for name, each in self.kwargs.items()}
        return call(self.target, *map(argument, self.args), **kwargs)


@dataclass(frozen=True)
class _Replacement:
    """``with_`` takes the place of ``output``; nothing else needs the nodes ``inside``."""

    output: fx.Node
    with_: New | Value
    operands: dict[Value, fx.Node]
    inside: tuple[fx.Node, ...]
    is_copied: bool


class Rewriter:
    """Collects the rewrites of one pass over one graph and its bodies; :meth:`result` writes them.

    The graph stays as it is until then, so that all facts hold while they are read.
    """

    def __init__(self, graph: fx.GraphModule, context: PassContext) -> None:
        self.context = context
        self.numbering = number_values(graph, context.effects)
        self.operators = Operators(self.numbering, context.effects)
        self._flows: list[Flow[Any]] = []
        self._replacements: dict[fx.Node, _Replacement] = {}
        self._refused: dict[Value, str] = {}
        self._left: set[Value] = set()

    def flow(self, rules: Rules[F]) -> Flow[F]:
        """The facts of the graph. What the rules refuse becomes a skip; so does each end that nothing is done with."""
        flow = Flow(self.operators, rules)
        self._flows.append(flow)
        return flow

    def replace(self, value: Value, *, with_: New | Value) -> bool:
        """Put ``with_`` in the place of ``value``, for all who take it. Returns whether that will be done.

        It is not, and a skip says why, unless all of this is proved:

        - what ``with_`` takes is still in memory where ``value`` is made, and is of the same graph or body;
        - nothing else uses what is computed between the two;
        - that is computed in one mode of autocast, passes gradients on, and writes no memory but its own;
        - the result has the shape, strides, dtype and device of ``value``, and needs a gradient if that does;
        - nobody writes memory that backward reads, or that only one of the two results shares.
        """
        try:
            found = self._proved(value, with_)
        except Refused as refusal:
            self.refuse(value, refusal.reason)
            return False
        if not self.context.fuel.take(f"write {found.output.name} as {_shown(with_, self.operators)}"):
            self._left.add(value)
            return False
        self._replacements[found.output] = found
        return True

    def refuse(self, value: Value, reason: str) -> None:
        """Leave ``value`` as it is; the skip has the ``reason``."""
        self._refused[value] = reason

    def result(self) -> PassResult:
        """Write the rewrites, and erase what nothing needs any more. Counts: ``rewritten``, ``nodes_erased``."""
        skips = tuple(dict.fromkeys(self._skips()))
        counts = {"rewritten": len(self._replacements)}
        if self._replacements:
            counts["nodes_erased"] = self._write()
            self.numbering.recompile()
        return PassResult(changed=bool(self._replacements), counts=counts, skips=skips)

    # -- what every rewrite needs

    def _proved(self, value: Value, with_: New | Value) -> _Replacement:
        output = self.operators.node_of(value)
        if output is None or not is_call(output):
            raise Refused("it is computed inside of a call that does more")
        taken = [with_] if isinstance(with_, Value) else with_.values()
        operands = {each: self._at_hand(each, output) for each in taken}
        between = self._between(value, operands)
        inside = nodes_used_alone([node for node in between if node is not output], output, self.operators)
        if isinstance(inside, fx.Node):
            raise Refused(f"what is computed on the way to it is used elsewhere too, by '{inside.name}'")
        chain = (output, *inside)
        for other in self._replacements.values():
            if not {*chain}.isdisjoint((other.output, *other.inside)):
                raise Refused(f"it is a part of what '{other.output.name}' is rewritten with")
        self._require_no_effects(chain, operands.values())
        if len({self.operators.mode(node).autocast for node in chain}) > 1:
            raise Refused("autocast is switched on or off inside of it")
        gradients = Gradients(output, self.operators)
        if not all(map(gradients.pass_through, chain)):
            raise Refused("gradients are switched off for a part of it")
        if inside and not gradients.are_cut_off and strides_are_seen([*operands.values()], self.operators):
            raise Refused("a hook or a backward of your own gets its gradients, and may depend on their strides")
        self._require_same(output, with_, operands)
        own, is_new = storages_of(value_of(output)), isinstance(with_, New)
        if is_new and not gradients.may_save(*operands.values()):
            raise Refused("what it is made of is written in place later, and backward would read it")
        is_written = not self.numbering.is_unwritten_after(own, output) or bool(own & self.numbering.returned)
        return _Replacement(output, with_, operands, inside, is_new and is_written and requires_grad(value_of(output)))

    def _at_hand(self, value: Value, output: fx.Node) -> fx.Node:
        node = self.operators.operand(value, output)
        if node is None:
            raise Refused("what it is made of is written in place before it is computed, or is no tensor of a node")
        if node.graph is not output.graph:
            raise Refused("what it is made of belongs to another graph")
        if self.numbering.ends[node] >= self.numbering.starts[output]:
            raise Refused("what is to replace it is computed later")
        return node

    def _between(self, value: Value, operands: dict[Value, fx.Node]) -> list[fx.Node]:
        """The nodes on the way from ``operands`` to ``value``."""
        starts = self.numbering.starts
        first = min((starts[node] for node in operands.values()), default=0)
        given: dict[Value, list[Value]] = {}
        waiting = [value]
        while waiting:
            each = waiting.pop()
            if each in given or each in operands or starts[each.node] < first:
                continue
            call = self.operators.does(each)
            items = leaves(dict(call.arguments)) if call is not None else ()
            given[each] = [item for item in items if isinstance(item, Value)]
            waiting += given[each]
        found = set(operands)
        for each in sorted(given, key=lambda made: (starts[made.node], made.step)):
            if not found.isdisjoint(given[each]):
                found.add(each)
        return list(dict.fromkeys(each.node for each in found - operands.keys()))

    def _require_no_effects(self, chain: Sequence[fx.Node], operands: Iterable[fx.Node]) -> None:
        own = storages_of(values_of(chain))
        own -= storages_of(values_of(operands)) | self.numbering.inputs
        for node in chain:
            effects = self.numbering.effects[node]
            is_pure = effects.kind is Kind.PURE or (effects.writes and effects.writes <= own)
            if effects.syncs or effects.random or not is_pure:
                raise Refused(f"'{node.name}' draws random numbers, writes memory, or does something that is not known")

    def _require_same(self, output: fx.Node, with_: New | Value, operands: dict[Value, fx.Node]) -> None:
        """Raises Refused unless both results have the same metadata, and may or may not share memory alike."""
        expected = value_of(output)
        found = value_of(operands[with_]) if isinstance(with_, Value) else self._computed(output, with_, operands)
        if not isinstance(found, torch.Tensor) or not is_plain(found) or not is_plain(expected):
            raise Refused("it is no plain tensor")
        for what, of in _METADATA.items():
            if of(found) != of(expected):
                raise Refused(f"its {what} is {_text(of(expected))}, and would be {_text(of(found))}")
        before = storages_of(values_of(output.all_input_nodes + list(operands.values())))
        shared = storages_of([expected, found])
        is_shared = isinstance(with_, Value) or bool(shared & (before | self.numbering.inputs))
        is_seen = not self.numbering.is_unwritten_after(shared, output) or bool(shared & self.numbering.returned)
        if is_shared and is_seen:
            raise Refused("it shares memory that is written or returned")

    def _computed(self, output: fx.Node, with_: New, operands: dict[Value, fx.Node]) -> Any:
        """The fake result of ``with_`` in the place of ``output``."""
        fake_mode, shape_env = self.context.effects.fake_mode, self.context.shape_env
        try:
            with self.operators.mode(output).entered(), symbols.speculation(fake_mode, shape_env):
                return with_.made(_called, lambda value: value_of(operands[value]))
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as failure:
            raise Refused(f"{with_} cannot be computed in its place: {failure}") from None

    # -- skips, and writing

    def _skips(self) -> Iterator[Skip]:
        facts = [value for flow in self._flows for value in flow.facts]
        done = {*self._left, *(value for value in facts if self.operators.node_of(value) in self._replacements)}
        for flow in self._flows:
            for operand, refusal in flow.refusals:
                if operand not in done and refusal.node is not None:
                    yield Skip.at(refusal.node, refusal.reason)
            for made, fact in flow.ends():
                if made.value not in done and made.value not in self._refused:
                    yield Skip.at(made.value.node, f"it is {fact}, and no rule carries that on")
        for value, reason in self._refused.items():
            yield Skip.at(value.node, reason)

    def _write(self) -> int:
        make = NodeMaker(self.context.effects.fake_mode)
        results: dict[fx.Node, fx.Node] = {}
        abandoned: list[fx.Node] = []

        for each in self._replacements.values():
            output = each.output
            with make.before(output, self.operators.mode(output), output):
                operands = {value: results.get(node, node) for value, node in each.operands.items()}
                if isinstance(each.with_, Value):
                    result = operands[each.with_]
                else:
                    result = each.with_.made(make.call, operands.__getitem__)
                    if each.is_copied:  # Autograd may have saved it, and does not see what others write.
                        result = make.call(torch.ops.glue.private_copy.default, result)
                    result.meta["example_value"] = value_of(output)
            output.replace_all_uses_with(result)
            results[output] = result
            abandoned += [arg for node in (output, *each.inside) for arg in node.all_input_nodes]
            for node in (output, *each.inside):
                node.graph.erase_node(node)
        return erase_dead(self.numbering, abandoned) + sum(1 + len(each.inside) for each in self._replacements.values())


def _called(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _shown(with_: New | Value, operators: Operators) -> str:
    if isinstance(with_, New):
        return str(with_)
    node = operators.node_of(with_)
    return node.name if node is not None else "its operand"


_METADATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
    "shape": lambda tensor: expressions(tensor.shape),
    "layout": lambda tensor: expressions(tensor.stride()),
    "need of a gradient": lambda tensor: tensor.requires_grad,
}


def _text(value: Any) -> str:
    return str(list(map(str, value))) if isinstance(value, tuple) else str(value)


__all__ = ["New", "Rewriter"]
