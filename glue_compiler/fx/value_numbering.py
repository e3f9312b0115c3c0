"""Value numbering of a captured graph together with the bodies of its higher-order operators.

Two nodes with one number compute the same value: equal operators on equal operands, of the same memory contents, in
the same mode. Unbacked symbols of equal data-dependent results are equal too, and are read as one from there on.

Source: global value numbering restricted to straight-line code (Alpern, Wegman, Zadeck 1988; hash-based form as in
Briggs, Cooper, Simpson 1997), with memory as a version counter per storage.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx import bodies
from glue_compiler.fx.bodies import BodyCall
from glue_compiler.fx.effects import EffectAnalysis, Effects, Kind, open_or_close
from glue_compiler.fx.values import (
    StorageKey,
    Symbolic,
    expression,
    is_plain,
    leaves,
    storages_of,
    unbacked_in,
    value_of,
)

Number = int
Mode = tuple[str, ...]
"""The open contexts (autocast and the like), outermost first, each with its arguments."""


@dataclass(eq=False)
class Scope:
    """One graph: the captured one, or the body of a call in ``parent``."""

    module: fx.GraphModule
    parent: Scope | None = None
    call: BodyCall | None = None
    called_at: int = 0
    """Time of the call: a node that reads no memory written later sees what the caller sees."""
    mode: Mode = ()
    """The mode at the call."""
    children: list[Scope] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1


@dataclass(frozen=True, eq=False)
class Occurrence:
    """One computation of a value."""

    node: fx.Node
    scope: Scope
    time: int
    last_write: int
    """Time of the last write to memory that the node reads."""
    mode: Mode


@dataclass
class Numbering:
    """The result. ``occurrences[n]`` are in order of execution; nodes of every scope are in ``numbers``."""

    root: Scope
    scopes: list[Scope]
    numbers: dict[fx.Node, Number]
    occurrences: dict[Number, list[Occurrence]]
    effects: dict[fx.Node, Effects]
    written: set[StorageKey]
    """Storages that are written somewhere in the graph."""
    returned: set[StorageKey]
    """Storages that the graph returns."""
    equal_symbols: dict[Any, Any]
    """Unbacked symbol → the equal one that was seen first."""
    separated: list[tuple[fx.Node, fx.Node, str]]
    """(node, earlier node, why): the same call, not proved to give the same value."""


def number_values(gm: fx.GraphModule, analysis: EffectAnalysis) -> Numbering:
    """Number all values of ``gm`` and of the bodies in it that run once. Changes nothing."""
    return _Numberer(gm, analysis).run()


class _Numberer:
    def __init__(self, gm: fx.GraphModule, analysis: EffectAnalysis) -> None:
        self.analysis = analysis
        self.fresh = itertools.count()
        self.clock = itertools.count(1)
        self.by_key: dict[Any, Number] = {}
        self.results: dict[Number, fx.Node] = {}
        self.by_call: dict[Any, fx.Node] = {}
        self.last_write: dict[StorageKey, int] = defaultdict(int)
        self.last_barrier = 0
        self.mode: list[fx.Node] = []
        root = Scope(gm)
        self.out = Numbering(root, [root], {}, defaultdict(list), {}, set(), set(), {}, [])

    def run(self) -> Numbering:
        self._scope(self.out.root)
        return self.out

    def _scope(self, scope: Scope) -> None:
        calls = bodies.body_calls(scope.module)
        inherited = {}
        if scope.call is not None:
            inherited = dict(zip(scope.call.placeholders, scope.call.operands, strict=True))
        for node in scope.module.graph.nodes:
            if node.op == "output":
                self.out.returned |= storages_of([value_of(arg) for arg in node.all_input_nodes])
            elif node.op == "placeholder":
                operand = inherited.get(node)
                number = self.out.numbers[operand] if isinstance(operand, fx.Node) else next(self.fresh)
                self.out.numbers[node] = number
                self._occurs(number, node, scope)
            elif node.op == "get_attr":
                attribute = bodies.attribute_of(scope.module, node)
                key = ("attribute", id(attribute)) if isinstance(attribute, torch.Tensor) else ("node", node)
                self._set(node, scope, self._number_of_key(key, node))
            elif node in calls:
                self._call(scope, node, calls[node])
            else:
                self._operator(scope, node)

    def _call(self, scope: Scope, node: fx.Node, call: BodyCall) -> None:
        child = Scope(call.body, scope, call, next(self.clock), self._mode_now())
        scope.children.append(child)
        self.out.scopes.append(child)
        outer_mode, written_before = list(self.mode), len(self.out.written)
        self._scope(child)
        self.mode = outer_mode
        inside = [storages_of(value_of(placeholder)) for placeholder in call.placeholders]
        outside = [storages_of(value_of(arg)) if isinstance(arg, fx.Node) else set() for arg in call.operands]
        if len(self.out.written) > written_before and inside != outside:
            self.last_barrier = next(self.clock)  # the body wrote to memory whose name outside is not known
        self.out.effects[node] = Effects(Kind.OPAQUE)
        self._set(node, scope, next(self.fresh))

    def _operator(self, scope: Scope, node: fx.Node) -> None:
        effects = self.out.effects[node] = self.analysis.of(scope.module, node)
        if effects.kind is Kind.MODE:
            open_or_close(self.mode, node)
        if effects.kind in (Kind.PURE, Kind.ASSERT):
            number = self._pure(node, effects)
        else:
            number = next(self.fresh)
            self._note_separated(node, effects)
        self._set(node, scope, number)
        if effects.kind is Kind.BARRIER:
            self.last_barrier = next(self.clock)
            self.out.written |= storages_of([value_of(arg) for arg in node.all_input_nodes])
        for storage in effects.writes:
            self.last_write[storage] = next(self.clock)
        self.out.written |= effects.writes

    def _mode_now(self) -> Mode:
        return tuple(f"{node.target} {node.args} {node.kwargs}" for node in self.mode)

    def _pure(self, node: fx.Node, effects: Effects) -> Number:
        call = (effects.kind, node.op, node.target if effects.kind is Kind.PURE else "assert")
        # What an assertion says when it fails is no part of what it checks.
        arguments = (node.args, node.kwargs) if effects.kind is Kind.PURE else (node.args[:1], {})
        described = self._describe(arguments, with_memory=True)
        value = value_of(node)
        own = self._own_symbols(node)
        key = (call, described, self._mode_now(), self.last_barrier, self._metadata(value, own))
        number = self.by_key.get(key)
        if number is None:
            self._note_separated(node, effects)
            number = self._number_of_key(key, node)
        else:
            for symbol, earlier in zip(own, self._own_symbols(self.results[number]), strict=True):
                if symbol != earlier:
                    self.out.equal_symbols[symbol] = self._canonical(earlier)
        return number

    def _own_symbols(self, node: fx.Node) -> list[Any]:
        """The unbacked symbols that come into being at this node."""
        inherited: set[Any] = set()
        for arg in node.all_input_nodes:
            inherited.update(self._canonical(symbol) for symbol in unbacked_in(value_of(arg)))
        return [s for s in unbacked_in(value_of(node)) if self._canonical(s) not in inherited]

    def _canonical(self, number: Any) -> Any:
        if isinstance(number, sympy.Basic) and number.free_symbols & self.out.equal_symbols.keys():
            return number.xreplace(self.out.equal_symbols)
        return number

    def _metadata(self, value: Any, own: list[Any]) -> Any:
        """Everything about a result but its contents; symbols that the node itself makes are numbered."""
        names = {symbol: sympy.Symbol(f"own{i}") for i, symbol in enumerate(own)}

        def number(item: Any) -> Any:
            item = self._canonical(expression(item))
            return item.xreplace(names) if isinstance(item, sympy.Basic) else item

        described: list[tuple[Any, ...]] = []
        for leaf in leaves(value):
            if isinstance(leaf, torch.Tensor) and not is_plain(leaf):
                described.append((type(leaf), id(leaf)))
            elif isinstance(leaf, torch.Tensor):
                shape = tuple(tuple(map(number, n)) for n in (leaf.shape, leaf.stride(), [leaf.storage_offset()]))
                described.append((leaf.dtype, leaf.device, shape, leaf.requires_grad))
            elif isinstance(leaf, Symbolic):
                described.append((type(leaf), number(leaf)))
            else:
                described.append((type(leaf), repr(leaf)))
        return tuple(described)

    def _describe(self, value: Any, with_memory: bool) -> Any:
        if isinstance(value, fx.Node):
            versions = (
                tuple(self.last_write.get(s, 0) for s in sorted(storages_of(value_of(value)))) if with_memory else ()
            )
            return ("value", self.out.numbers.get(value, value), versions)
        if isinstance(value, tuple | list):
            return (type(value).__name__, *(self._describe(item, with_memory) for item in value))
        if isinstance(value, dict):
            return ("dict", *((key, self._describe(item, with_memory)) for key, item in sorted(value.items())))
        if isinstance(value, slice):
            return ("slice", self._describe((value.start, value.stop, value.step), with_memory))
        return (type(value), repr(value))

    def _note_separated(self, node: fx.Node, effects: Effects) -> None:
        """Remember calls that look equal and are not, for the reasons that a pass reports."""
        key = (node.op, node.target, self._describe((node.args, node.kwargs), with_memory=False))
        earlier = self.by_call.setdefault(key, node)
        if earlier is node or effects.kind not in (Kind.PURE, Kind.OPAQUE) or effects.writes:
            return
        reason = (
            "it draws random numbers" if effects.random else "an operator that is not torch's own may differ each time"
        )
        if effects.kind is Kind.PURE:
            reason = "memory that both read is written between them, or the mode differs"
        self.out.separated.append((node, earlier, reason))

    def _number_of_key(self, key: Any, node: fx.Node) -> Number:
        if key not in self.by_key:
            self.by_key[key] = next(self.fresh)
            self.results[self.by_key[key]] = node
        return self.by_key[key]

    def _set(self, node: fx.Node, scope: Scope, number: Number) -> None:
        self.out.numbers[node] = number
        self._occurs(number, node, scope)

    def _occurs(self, number: Number, node: fx.Node, scope: Scope) -> None:
        read = storages_of([value_of(arg) for arg in node.all_input_nodes])
        last = max((self.last_write.get(storage, 0) for storage in read), default=0)
        occurrence = Occurrence(node, scope, next(self.clock), max(last, self.last_barrier), self._mode_now())
        self.out.occurrences[number].append(occurrence)
