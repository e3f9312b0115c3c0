"""Facts about values, carried from operator to operator.

A fact is a frozen dataclass that says what a value is, such as "softmax over ``dim`` of ``scores``". :class:`Rules` say
which operators begin a fact and what each further operator makes of it, one small function an operator::

    RULES = Rules[Weights]()

    @RULES.begin(aten.softmax)
    def _(made):
        return Weights(made["self"], made["dim"])

    @RULES(aten.clone, aten.contiguous)
    def _(weights, made):
        return weights

:class:`Flow` applies them to a graph and to the bodies in it, in the order in which operators run. Names and spellings
of calls do not enter: a rule is given the operator that a call dispatches, and its arguments as values, which name what
the operator finds in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.private_nodes import readers_of
from glue_compiler.fx.records import Made
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import is_call, leaves

F = TypeVar("F")


class Refused(Exception):
    """Something is left alone for ``reason``, which shows at ``node``. A rule may raise it without a node."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


@dataclass(frozen=True)
class Result:
    """A result of one operator. ``made["dim"]`` is an argument of the call, by its name in the operator's schema.

    Attributes:
        value: the result.
        call: the operator, and all arguments.
        carried: of a rule that carries a fact on, the name of the argument that has the fact.
    """

    value: Value
    call: Call
    operators: Operators
    carried: str = ""

    def __getitem__(self, name: str) -> Any:
        """A tensor as a :class:`Value`; numbers, dtypes and tuples as they are; KeyError for a name of another call."""
        return self.call.arguments[name]

    @property
    def dtype(self) -> torch.dtype:
        return self.operators.dtype(self.value)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Ints, and sympy expressions for sizes that are dynamic."""
        return self.operators.shape(self.value)

    def dtype_of(self, value: Value) -> torch.dtype:
        return self.operators.dtype(value)

    def shape_of(self, value: Value) -> tuple[Any, ...]:
        return self.operators.shape(value)

    def before_widening(self, name: str) -> Value:
        """The tensor that is passed as ``name``; of one that was converted from a narrower floating dtype, that one."""
        value: Value = self[name]
        while True:
            call = self.operators.does(value, *CONVERSIONS)
            if call is None:
                return value
            before: Value = call.arguments["self"]
            if not self.operators.is_tensor(before):
                return value
            narrow, wide = self.dtype_of(before), self.dtype_of(value)
            if not narrow.is_floating_point or torch.promote_types(narrow, wide) != wide:
                return value
            value = before


_Begins = Callable[[Result], F | None]
_Carries = Callable[[F, Result], F | None]


class Rules(Generic[F]):
    """What operators make of facts of one class.

    ``@rules.begin(aten.softmax)`` decorates a function that takes the :class:`Result` and returns its fact, or None.
    ``@rules(aten.mul, of=("self", "other"))`` decorates one that takes the fact of an operand and the result, and
    returns the result's fact, or None where it has none. ``of`` names the arguments that may have the fact; without it,
    that is the operator's first one. Both may raise :class:`Refused`, whose reason becomes a skip.
    """

    def __init__(self) -> None:
        self.begins: dict[Any, _Begins[F]] = {}
        self.carries: dict[Any, tuple[tuple[str, ...], _Carries[F]]] = {}

    def begin(self, *operators: Any) -> Callable[[_Begins[F]], _Begins[F]]:
        def add(rule: _Begins[F]) -> _Begins[F]:
            self.begins.update(dict.fromkeys(operators, rule))
            return rule

        return add

    def __call__(self, *operators: Any, of: tuple[str, ...] = ()) -> Callable[[_Carries[F]], _Carries[F]]:
        def add(rule: _Carries[F]) -> _Carries[F]:
            self.carries.update(dict.fromkeys(operators, (of, rule)))
            return rule

        return add


@dataclass
class Flow(Generic[F]):
    """The facts of one graph.

    Attributes:
        facts: of the values that have one, in the order in which they are made.
        refusals: what rules have refused, each with the operand whose fact it was about; None: it began none.
    """

    operators: Operators
    rules: Rules[F]
    facts: dict[Value, F] = field(default_factory=dict)
    refusals: list[tuple[Value | None, Refused]] = field(default_factory=list)
    _results: dict[Value, Result] = field(default_factory=dict)
    _carried_by: dict[Value, set[fx.Node]] = field(default_factory=dict)
    _bodies: dict[fx.Node, Scope] = field(default_factory=dict)
    _downstream: set[fx.Node] = field(default_factory=set)
    """Nodes that may find something with a fact in memory, so that few calls are looked into."""

    def __post_init__(self) -> None:
        self._read(self.operators.numbering.root)

    def of(self, value: Any) -> F | None:
        """The fact of ``value``; in a body also that of what the caller passes."""
        while isinstance(value, Value) and value not in self.facts:
            value = self.operators.passed(value)
        return self.facts[value] if isinstance(value, Value) else None

    def ends(self) -> Iterator[tuple[Result, F]]:
        """The values with a fact that something takes without carrying the fact on: where a rewrite may begin."""
        return ((self._results[value], fact) for value, fact in self.facts.items() if self._is_end(value))

    def _read(self, scope: Scope) -> None:
        bodies = scope.bodies
        self._bodies |= bodies
        for node in scope.graph.nodes:
            if node in bodies:
                self._read(bodies[node])
            elif node.op == "placeholder":
                outer = self.operators.passed(Value(node))
                self._downstream |= {node} if outer is not None and outer.node in self._downstream else set()
            elif is_call(node):
                is_downstream = not self._downstream.isdisjoint(node.all_input_nodes)
                if is_downstream or self.operators.dispatches(node, self.rules.begins):
                    self._read_calls(node)

    def _read_calls(self, node: fx.Node) -> None:
        self._downstream.add(node)
        if self.operators.numbering.effects[node].writes:  # its operands have the result in them
            self._downstream.update(node.all_input_nodes)
        record = self.operators.record(node)
        if record is not None:
            given = [list(each.arguments.values()) for each in record.operators]
            # A call that gives its operand back makes no value of its own.
            taken = {each for each in leaves([*given, record.result]) if isinstance(each, Made)}
            for each in sorted(taken, key=lambda made: (made.step, made.result)):
                self._make(Value(node, each.step, each.result))

    def _make(self, value: Value) -> None:
        call = self.operators.does(value) if self.operators.is_tensor(value) else None
        if call is None:
            return
        operand: Value | None = None
        try:
            fact = None
            of, carry = self.rules.carries.get(call.operator, ((), None))
            given = [(name, each) for name, item in call.arguments.items() for each in leaves(item)]
            found = [(name, each) for name, each in given if self.of(each) is not None]
            made = Result(value, call, self.operators, found[0][0] if found else "")
            if carry is not None and found and found[0][0] in (of or list(call.arguments)[:1]):
                operand = found[0][1]
                if len(found) > 1:
                    raise Refused(f"{call.operator} takes two such values")
                behind = self.of(operand)
                assert behind is not None
                fact = carry(behind, made)
                if fact is not None:
                    self._carried_by.setdefault(operand, set()).add(value.node)
            if fact is None and call.operator in self.rules.begins:
                fact = self.rules.begins[call.operator](made)
        except Refused as refusal:
            self.refusals.append((operand, Refused(refusal.reason, refusal.node or value.node)))
            return
        if fact is not None:
            self.facts[value], self._results[value] = fact, made

    def _is_end(self, value: Value) -> bool:
        node = self.operators.node_of(value)
        carried_by = self._carried_by.get(value, set())
        if node is None:  # inside of a call of several operators
            return value.node not in carried_by
        return any(not self._is_carried(value, reader) for reader in readers_of(value, self.operators))

    def _is_carried(self, value: Value, reader: fx.Node) -> bool:
        if reader in self._carried_by.get(value, ()):
            return True
        call = self._bodies[reader].call if reader in self._bodies else None
        if call is None:
            return False
        inside = [each for each in call.placeholders if self.operators.passed(Value(each)) == value]
        return all(
            self._is_carried(Value(each), user) for each in inside for user in readers_of(Value(each), self.operators)
        )


__all__ = ["CONVERSIONS", "Flow", "Refused", "Result", "Rules"]
