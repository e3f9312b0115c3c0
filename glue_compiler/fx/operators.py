"""A captured graph as the operators that its nodes dispatch: values, what makes them, and what memory holds.

Analyses match on operators and named arguments::

    match operators.does(value):
        case Call(aten.dropout, {"input": weights, "p": p, "train": train}): ...

Operators are recorded above autograd and autocast (:mod:`glue_compiler.fx.records`), so ``linear``, ``softmax`` and
``scaled_dot_product_attention`` are whole, and every spelling of a call gives the same operators, in a normal form
(:mod:`glue_compiler.fx.normal`): ``x[m] = 0``, ``x.masked_fill_(m, 0)`` and ``torch.where(m, 0, x)`` are one
``aten.where``. A value names a version: what is an argument of an operator is what the operator finds in memory,
whatever was written before.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.modes import Mode
from glue_compiler.fx.normal import LISTS, functional, normal, taken
from glue_compiler.fx.records import CallRecord, Given, Made, Meta, RecordedOperator, Unknown, map_references, meta_of
from glue_compiler.fx.value_numbering import Numbering
from glue_compiler.fx.values import StorageKey, is_plain, leaves, requires_grad, storage_of, value_of, values_of

OWN, UNTRACKED = -1, -2


@dataclass(frozen=True)
class Value:
    """A tensor, or a number read from one, as it is when it is made.

    Attributes:
        node: the captured node at which it comes to be.
        step: which of the node's operators makes it; OWN for what the node itself is: an input, an attribute, the
            result of a call that is not looked into; UNTRACKED for what others find in the node's memory after a write
            that is not followed.
        leaf: which of the results of that operator, or of the node's value, flattened.
        since: of what is UNTRACKED, the time of that write: all that read before the next write find one value.
    """

    node: fx.Node
    step: int = OWN
    leaf: int = 0
    since: int = 0


@dataclass(frozen=True)
class Call:
    """One operator of ATen or of a library, called.

    Attributes:
        operator: the packet, such as ``torch.ops.aten.add``, in normal form (:mod:`glue_compiler.fx.normal`): that of
            an operator in place is the one out of place.
        arguments: by the names of the schema, absent ones with their defaults: tensors as :class:`Value`, symbolic
            numbers as sympy expressions, tensors of one known element as Python numbers, lists as tuples.
        overload: such as ``torch.ops.aten.add.Tensor``.
        node: the captured node that it is a part of.
        recorded: the operator as it was called.
    """

    operator: Any
    arguments: Mapping[str, Any]
    overload: Any
    node: fx.Node
    recorded: RecordedOperator

    __match_args__ = ("operator", "arguments")

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments that it writes."""
        return self.recorded.written

    @property
    def either_way(self) -> list[tuple[Any, Any]]:
        """The operands of one that commutes, both ways round; in place the first alone is written, and stays first."""
        pair = self.arguments["self"], self.arguments["other"]
        return [pair] if self.written else [pair, pair[::-1]]

    @property
    def writes_out(self) -> bool:
        """Is it given the tensor to write its result into?"""
        return bool(self.written) and any(each.is_out for each in self.recorded.overload._schema.arguments)


@dataclass
class Operators:
    """Reads one numbered graph and the bodies in it. Remembers what it has read; changes nothing."""

    numbering: Numbering
    analysis: EffectAnalysis
    _modules: dict[fx.Graph, fx.GraphModule] = field(default_factory=dict)
    _records: dict[fx.Node, CallRecord | None] = field(default_factory=dict)
    _operands: dict[fx.Node, list[Value]] = field(default_factory=dict)
    _calls: dict[fx.Node, list[Call] | None] = field(default_factory=dict)
    _passed: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for scope in self.numbering.scopes:
            self._modules[scope.graph] = scope.module
            if scope.call is not None:
                pairs = zip(scope.call.placeholders, scope.call.operands, strict=True)
                call = scope.call.node
                self._passed |= {inner: (outer, call) for inner, outer in pairs if isinstance(outer, fx.Node)}

    # -- values of nodes

    def value(self, node: fx.Node, leaf: int = 0) -> Value:
        """What ``node`` evaluates to when it is made, or item ``leaf`` of it, flattened.

        A call that gives one of its operands, such as ``contiguous()`` of what is contiguous, stands for the operand.
        """
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            index, source = node.args[1], value_of(node.args[0])
            if isinstance(source, tuple | list) and type(index) is int and _is_flat(source):
                return self.found(node.args[0], node, index % len(source)) or Value(node)
        record = self.record(node)
        if record is None or leaf >= len(record.result):
            return Value(node, OWN, leaf)
        return self._resolved(node, record.result[leaf], leaf)

    def found(self, node: fx.Node, at: fx.Node, leaf: int = 0) -> Value | None:
        """What ``at`` finds in ``node``: the result of ``node``, or of what has written all of its memory since.

        None: the memory may have been written in a way that is not followed.
        """
        value = self.value(node, leaf)
        if not self.is_tensor(value) or self.is_kept(value, at):
            return value
        writer = self.numbering.contents(node, at) if not leaf else None
        return self.value(writer) if writer is not None and writer is not node else None

    def read(self, node: fx.Node, at: fx.Node, leaf: int = 0) -> Value:
        """What ``at`` finds in ``node``: if it may be what nothing known has written, a value that nothing ``does``."""
        found = self.found(node, at, leaf)
        if found is not None:
            return found
        tensor = self._own(Value(node, OWN, leaf))
        since = self.numbering.last_write(storage_of(tensor), node, at) if is_plain(tensor) else None
        return Value(node, UNTRACKED, leaf, self.numbering.starts[at] if since is None else since)

    def _resolved(self, node: fx.Node, reference: Any, leaf: int) -> Value:
        if isinstance(reference, Given):
            return self._given(node)[reference.position]
        if isinstance(reference, Made):
            return Value(node, reference.step, reference.result)
        return Value(node, OWN, leaf)

    def passed(self, value: Value) -> Value | None:
        """For an input of a body, what the caller passes."""
        outer = self._passed.get(value.node) if value.step == OWN else None
        return self.found(*outer) if outer is not None else None

    def body_of(self, node: fx.Node) -> fx.GraphModule | None:
        """The body that ``node`` calls, if that is numbered with the graph."""
        calls = (scope for scope in self.numbering.scopes if scope.call is not None and scope.call.node is node)
        return next((scope.module for scope in calls), None)

    def operand(self, value: Value, at: fx.Node) -> fx.Node | None:
        """A node whose memory still holds ``value`` when ``at`` runs."""
        node = value.node if value.step == UNTRACKED and not value.leaf else self.node_of(value)
        return node if node is not None and (not self.is_tensor(value) or self.is_kept(value, at)) else None

    def node_of(self, value: Any) -> fx.Node | None:
        """A node that evaluates to ``value``; None for a value inside of a call, for items that no node takes, and for
        what is no :class:`Value`."""
        if not isinstance(value, Value) or value.step == UNTRACKED:
            return None
        node = value.node
        if isinstance(value_of(node), tuple | list):
            items = (user for user in node.users if user.target is operator.getitem)
            return next((item for item in items if self.value(item) == value), None)
        return node if self.value(node) == value else None

    # -- what makes them

    def mode(self, node: fx.Node) -> Mode:
        """The mode of autograd and autocast that ``node`` runs in."""
        return self.analysis.mode_of(self._modules[node.graph], node)

    def is_grad_on(self, node: fx.Node) -> bool:
        """Are gradients recorded where ``node`` stands?"""
        return self.mode(node).is_grad_on

    def passes_gradients(self, node: fx.Node) -> bool:
        """Does ``node`` pass gradients on to its operands, where they need any? By its mode, not by what it does."""
        return self.is_grad_on(node) or not requires_grad(values_of(node.all_input_nodes))

    def record(self, node: fx.Node) -> CallRecord | None:
        if node not in self._records:
            module = self._modules.get(node.graph)
            self._records[node] = self.analysis.record_of(module, node) if module is not None else None
        return self._records[node]

    def does(self, value: Any, *operators: Any) -> Call | None:
        """The operator that makes ``value``; None for what is no :class:`Value`, for an input, an attribute, and a call
        that is not looked into; and for others than ``operators``, if there are some.

        Nor is one with ``out=``: it does more than to make its result. An item of ``split`` or ``unbind`` is a slice.
        """
        calls = self.calls(value.node) if isinstance(value, Value) and value.step >= 0 else None
        call = calls[value.step] if calls is not None else None
        if call is None or call.writes_out:
            return None
        if call.operator in LISTS:
            overload, arguments = taken(call.operator, call.arguments, value.leaf, call.recorded.results[value.leaf])
            call = replace(call, operator=overload.overloadpacket, overload=overload, arguments=arguments)
        return call if not operators or call.operator in operators else None

    def as_called(self, call: Call) -> tuple[Any, dict[str, Any]]:
        """The operator out of place, and its arguments as they are called, not in normal form: what can be written.

        Of an item of ``split`` or ``unbind``, the slice.
        """
        recorded = call.recorded.overload.overloadpacket
        if recorded in LISTS and call.operator is not recorded:
            return call.overload, dict(call.arguments)
        given = {
            name: map_references(value, lambda reference: self._resolved(call.node, reference, 0))
            for name, value in call.recorded.arguments.items()
        }
        return functional(call.recorded.overload) or call.recorded.overload, given

    def dispatches(self, node: fx.Node, operators: Collection[Any]) -> bool:
        """Does a node dispatch one of ``operators``, in normal form?"""
        return any(call.operator in operators for call in self.calls(node) or ())

    def calls(self, node: fx.Node) -> list[Call] | None:
        """All operators of a node, in order; None for a call that is not looked into."""
        if node not in self._calls:
            record = self.record(node)
            self._calls[node] = [self._call(node, each) for each in record.operators] if record is not None else None
        return self._calls[node]

    def only_call(self, node: fx.Node) -> Call | None:
        """The operator of a node that is made of no other."""
        calls = self.calls(node) or ()
        return calls[0] if len(calls) == 1 else None

    def passed_as(self, node: fx.Node, name: str) -> fx.Node | None:
        """The node that is passed to ``node`` as the argument ``name`` of its last operator."""
        record = self.record(node)
        return given_as(node, record.operators[-1], name) if record is not None and record.operators else None

    def _call(self, node: fx.Node, each: RecordedOperator) -> Call:
        given = {
            name: map_references(value, lambda reference: self._resolved(node, reference, 0))
            for name, value in each.arguments.items()
        }
        overload, arguments = normal(each.overload, given, each.results[0] if each.results else None)
        return Call(overload.overloadpacket, arguments, overload, node, each)

    def _given(self, node: fx.Node) -> list[Value]:
        """What a node's call finds in the tensors that it is given, in the order in which its record counts them."""
        if node not in self._operands:
            self._operands[node] = [self.read(arg, node, leaf) for arg, leaf in given_leaves(node)]
        return self._operands[node]

    # -- what is known of them

    def meta(self, value: Value) -> Meta:
        """Raises TypeError for a number."""
        record = self.record(value.node) if value.step >= 0 else None
        found = record.operators[value.step].results[value.leaf] if record is not None else self._own(value)
        if isinstance(found, torch.Tensor):
            found = meta_of(found)
        if not isinstance(found, Meta):
            raise TypeError(f"{value} is no tensor")
        return found

    def shape(self, value: Value) -> tuple[Any, ...]:
        """Sizes as ints and sympy expressions."""
        return self.meta(value).shape

    def dtype(self, value: Value) -> torch.dtype:
        return self.meta(value).dtype

    def rank(self, value: Value) -> int:
        return self.meta(value).rank

    def is_tensor(self, value: Any) -> bool:
        """Is it a plain, dense tensor?"""
        if not isinstance(value, Value):
            return False
        if value.step >= 0:
            record = self.record(value.node)
            assert record is not None
            return isinstance(record.operators[value.step].results[value.leaf], Meta)
        found = self._own(value)
        return isinstance(found, torch.Tensor) and is_plain(found)

    def number(self, value: Value) -> Any:
        """Equal for two values that are equal when they are made."""
        if value.step == UNTRACKED:
            return value
        node = self.node_of(value)
        if node is not None:
            return self.numbering.numbers[node]
        return (self.numbering.numbers[value.node], value.step, value.leaf)

    # -- what memory holds

    def storage(self, value: Value) -> StorageKey | None:
        """The memory that a value lies in; None for memory that no other value of the graph lies in."""
        if value.step < 0:
            found = self._own(value)
            return storage_of(found) if isinstance(found, torch.Tensor) and is_plain(found) else None
        record = self.record(value.node)
        assert record is not None
        position = record.operators[value.step].memory[value.leaf]
        if position >= 0:
            return self.storage(self._given(value.node)[position])
        made = Made(value.step, value.leaf)
        if made not in record.result:
            return None
        found = list(leaves(value_of(value.node)))[record.result.index(made)]
        return storage_of(found) if isinstance(found, torch.Tensor) and is_plain(found) else None

    def is_kept(self, value: Value, at: fx.Node) -> bool:
        """Does ``at`` find in the memory of ``value`` what was there when ``value`` was made?"""
        storage = self.storage(value)
        if not self.is_tensor(value):
            return False
        if storage is None:
            return True
        if value.step != UNTRACKED:
            return self.numbering.is_unwritten(storage, value.node, at)
        return self.numbering.last_write(storage, value.node, at) == value.since

    def is_fixed(self, value: Value) -> bool:
        """Is it a plain tensor whose memory nothing in the graph may write?"""
        if not self.is_tensor(value):
            return False
        storage = self.storage(value)
        return storage is None or storage not in self.numbering.written | self.numbering.unreadable

    def _own(self, value: Value) -> Any:
        found = list(leaves(value_of(value.node)))
        return found[value.leaf] if value.leaf < len(found) else None


def given_leaves(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The tensors that a node is given, in order, each as an operand and which leaf of it."""
    return [
        (arg, leaf)
        for arg in node.all_input_nodes
        for leaf, item in enumerate(leaves(value_of(arg)))
        if isinstance(item, torch.Tensor)
    ]


def given_as(node: fx.Node, made: RecordedOperator, name: str) -> fx.Node | None:
    """The node that is passed to ``node`` and on to ``made``, one of its operators, as the argument ``name``."""
    given = made.arguments.get(name)
    return given_leaves(node)[given.position][0] if isinstance(given, Given) else None


def _is_flat(values: Any) -> bool:
    return all(not isinstance(item, tuple | list | dict) for item in values)


__all__ = ["UNTRACKED", "OWN", "Call", "Operators", "Unknown", "Value", "given_as", "given_leaves"]
