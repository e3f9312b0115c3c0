"""Value numbering of a captured graph together with the bodies of its higher-order operators.

Two nodes with one number compute the same value: equal operators on equal operands, of the same memory contents, in
the same mode. Unbacked symbols of equal data-dependent results are equal too, and are read as one from there on.

Source: global value numbering restricted to straight-line code (Alpern, Wegman, Zadeck 1988; hash-based form as in
Briggs, Cooper, Simpson 1997), with memory as a version counter per storage.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx import bodies
from glue_compiler.fx.bodies import BodyCall
from glue_compiler.fx.effects import EffectAnalysis, Effects, Kind
from glue_compiler.fx.known_calls import Arguments, KnownCall
from glue_compiler.fx.snapshots import Snapshot
from glue_compiler.fx.values import (
    StorageKey,
    Symbolic,
    expression,
    expressions,
    is_plain,
    leaves,
    requires_grad,
    storage_of,
    storages_of,
    tensors_in,
    unbacked_in,
    value_of,
    values_of,
)

Number = int
Autocast = tuple[tuple[Any, ...], ...]
"""The open autocast regions, outermost first, each by its arguments."""


@dataclass(eq=False)
class Scope:
    """One graph: the captured one, or the body of a call in ``parent``."""

    module: fx.GraphModule
    parent: Scope | None = None
    call: BodyCall | None = None
    called_at: int = 0
    """Time of the call: a node that reads no memory written later sees what the caller sees."""
    mode: Autocast = ()
    """At the call."""
    children: list[Scope] = field(default_factory=list)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def bodies(self) -> dict[fx.Node, Scope]:
        """Of the calls in the graph."""
        return {child.call.node: child for child in self.children if child.call is not None}


@dataclass(frozen=True, eq=False)
class Occurrence:
    """One computation of a value."""

    node: fx.Node
    scope: Scope
    time: int
    last_write: int
    """Time of the last write to memory that the node reads."""
    mode: Autocast


@dataclass(frozen=True)
class Write:
    """Memory that may change at ``time``; ``writer`` is None if it is not known what is written there, or which
    gradients that has."""

    time: int
    storages: frozenset[StorageKey]
    writer: fx.Node | None


@dataclass
class Numbering:
    """The result. ``occurrences[n]`` are in order of execution; nodes of every scope are in ``numbers``.

    A number says what a node's result is when it is made. What a later node finds in that memory is asked with
    :meth:`contents`.
    """

    root: Scope
    scopes: list[Scope]
    numbers: dict[fx.Node, Number]
    occurrences: dict[Number, list[Occurrence]]
    effects: dict[fx.Node, Effects]
    written: set[StorageKey]
    """Storages that are written somewhere in the graph, or may be by a node that nothing is known of."""
    returned: set[StorageKey]
    """Storages that the graph returns."""
    equal_symbols: dict[Any, Any]
    """Unbacked symbol → the equal one that was seen first."""
    separated: list[tuple[fx.Node, fx.Node, str]]
    """(node, earlier node, why): the same call, not proved to give the same value."""
    writes: list[Write]
    """In order of execution."""
    starts: dict[fx.Node, int]
    """When a node reads its operands."""
    ends: dict[fx.Node, int]
    """When a node's result is made."""
    unreadable: set[StorageKey]
    """Memory of tensors that are given another shape in place: their metadata is that of the end of the graph."""
    inputs: set[StorageKey]
    """Memory of the graph's and the bodies' inputs and attributes."""

    @property
    def nodes(self) -> list[fx.Node]:
        """Of all scopes, as they are now."""
        return [node for scope in self.scopes for node in scope.graph.nodes]

    def recompile(self) -> None:
        """To be called after a rewrite."""
        for scope in self.scopes:
            scope.module.recompile()

    def contents(self, node: fx.Node, at: fx.Node) -> fx.Node | None:
        """The node whose result, when it was made, is what ``at`` finds in the memory of ``node``.

        ``node`` itself if nothing may have written that memory in between; a later node that wrote all of it in place,
        and passes gradients on where ``node`` does from then on; None if it is not known.
        """
        storages = storages_of(value_of(node))
        if storages & self.unreadable or not all(is_plain(tensor) for tensor in tensors_in(value_of(node))):
            return None
        last = self._last_write(storages, self.ends[node], self.starts[at])
        if last is None:
            return node
        if last.writer is None or not _is_same_view(value_of(last.writer), value_of(node)):
            return None
        has_gradient = requires_grad(value_of(last.writer)) or requires_grad(value_of(node))
        return None if has_gradient and not self._is_written_as_itself(node, last.writer) else last.writer

    def _is_written_as_itself(self, node: fx.Node, writer: fx.Node) -> bool:
        """Was ``writer``, or what it wrote to, passed ``node``, and no detached alias of it?"""
        same = [arg for arg in writer.all_input_nodes if _is_same_view(value_of(arg), value_of(node))]
        return node in same or any(arg in self._writers and self._is_written_as_itself(node, arg) for arg in same)

    @functools.cached_property
    def _writers(self) -> set[fx.Node | None]:
        return {write.writer for write in self.writes}

    def is_kept(self, node: fx.Node, at: fx.Node) -> bool:
        """Does ``at`` find in the memory of ``node`` what was there when ``node`` was made?"""
        return self.contents(node, at) is node

    def is_unwritten(self, storage: StorageKey, after: fx.Node, before: fx.Node) -> bool:
        """Is nothing written to ``storage`` between the two nodes, as far as is known?"""
        if storage in self.unreadable:
            return False
        return self._last_write({storage}, self.ends[after], self.starts[before]) is None

    def is_unwritten_after(self, storages: Iterable[StorageKey], node: fx.Node) -> bool:
        """Is nothing written to any of ``storages`` from ``node`` to the end of the graph, as far as is known?"""
        return all(s not in self.unreadable and self._last_writes.get(s, 0) <= self.ends[node] for s in storages)

    def is_private_after(self, storages: Iterable[StorageKey], node: fx.Node) -> bool:
        """:meth:`is_unwritten_after`, and by the graph's caller neither, who does not know this memory?"""
        return not set(storages) & (self.inputs | self.returned) and self.is_unwritten_after(storages, node)

    @functools.cached_property
    def _last_writes(self) -> dict[StorageKey, int]:
        return {storage: write.time for write in self.writes for storage in write.storages}

    def last_write(self, storage: StorageKey, node: fx.Node, before: fx.Node) -> int | None:
        """When ``storage`` was last written before ``before`` begins; None if not since ``node`` or not known."""
        found = self._last_write({storage}, self.ends[node], self.starts[before])
        return found.time if found is not None and storage not in self.unreadable else None

    def _last_write(self, storages: set[StorageKey], after: int, before: int) -> Write | None:
        for write in reversed(self.writes):
            if write.time <= after:
                return None
            if write.time < before and write.storages & storages:
                return write
        return None


def _is_same_view(first: Any, second: Any) -> bool:
    """Are these tensors the same elements of the same memory?"""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor) or first.dtype != second.dtype:
        return False
    views = [
        (storage_of(t), *(expressions(n) for n in (t.shape, t.stride(), [t.storage_offset()]))) for t in (first, second)
    ]
    return views[0] == views[1]


def number_values(gm: fx.GraphModule, analysis: EffectAnalysis, is_body: bool = False) -> Numbering:
    """Number all values of ``gm`` and of the bodies in it that run once. Changes nothing.

    As long as the graph does not change, the result is the same object, which is to be read only.

    Args:
        is_body: ``gm`` is a body of a graph whose modes ``analysis`` has read.
    """
    if is_body:
        return _Numberer(gm, analysis).run()
    analysis.read_modes(gm)
    symbols, (snapshot, earlier, numbering) = analysis.symbols, analysis.numberings.get(gm, (None, None, None))
    if snapshot is None or numbering is None or earlier != symbols or not snapshot.is_current():
        numbering = _Numberer(gm, analysis).run()
        analysis.numberings[gm] = Snapshot(gm), symbols, numbering
    return numbering


class _Numberer:
    def __init__(self, gm: fx.GraphModule, analysis: EffectAnalysis) -> None:
        self.analysis = analysis
        self.fresh = itertools.count()
        self.clock = itertools.count(1)
        self.by_key: dict[Any, Number] = {}
        self.results: dict[Number, fx.Node] = {}
        self.by_call: dict[Any, fx.Node] = {}
        self.last_write: dict[StorageKey, int] = {}
        self.last_barrier = 0
        self.mode: Autocast = ()
        self.escaped: set[StorageKey] = set()
        root = Scope(gm)
        self.out = Numbering(root, [root], {}, defaultdict(list), {}, set(), set(), {}, [], [], {}, {}, set(), set())

    def run(self) -> Numbering:
        self._scope(self.out.root)
        return self.out

    def _scope(self, scope: Scope) -> None:
        calls = bodies.body_calls(scope.module)
        inherited = {}
        if scope.call is not None:
            inherited = dict(zip(scope.call.placeholders, scope.call.operands, strict=True))
        for node in scope.graph.nodes:
            self.mode = self.analysis.mode_of(scope.module, node).autocast
            if node.op == "placeholder" or node.op == "get_attr":
                storages = storages_of(value_of(node))
                self.escaped |= storages  # others may hold it
                self.out.inputs |= storages
            if node.op == "output":
                self.out.starts[node] = self.out.ends[node] = next(self.clock)
                self.out.returned |= storages_of(values_of(node.all_input_nodes))
            elif node.op == "placeholder":
                operand = inherited.get(node)
                held = self._held(operand, scope) if isinstance(operand, fx.Node) else None
                number = self.out.numbers[held] if held is not None else next(self.fresh)
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

    def _held(self, operand: fx.Node, scope: Scope) -> fx.Node | None:
        """Of which node a body finds the result in what its caller passes."""
        assert scope.call is not None
        return self.out.contents(operand, scope.call.node) if tensors_in(value_of(operand)) else operand

    def _call(self, scope: Scope, node: fx.Node, call: BodyCall) -> None:
        self.out.starts[node] = next(self.clock)
        child = Scope(call.body, scope, call, next(self.clock), self.mode)
        scope.children.append(child)
        self.out.scopes.append(child)
        written_before = len(self.out.written)
        self._scope(child)
        self.mode = child.mode
        inside = [storages_of(value_of(placeholder)) for placeholder in call.placeholders]
        outside = [storages_of(value_of(arg)) if isinstance(arg, fx.Node) else set() for arg in call.operands]
        if len(self.out.written) > written_before and inside != outside:
            self._barrier(node)  # the body wrote to memory whose name outside is not known
        self.out.effects[node] = Effects(Kind.OPAQUE)
        self._set(node, scope, next(self.fresh), self.analysis.known(scope.module, node).read)

    def _operator(self, scope: Scope, node: fx.Node) -> None:
        effects = self.out.effects[node] = self.analysis.of(scope.module, node)
        known = self.analysis.known(scope.module, node)
        if effects.kind in (Kind.PURE, Kind.ASSERT):
            number = self._pure(known, effects)
        else:
            number = next(self.fresh)
            self._note_separated(known, effects)
        self._set(node, scope, number, known.read)
        if not known.is_plain:
            # A subclass, such as DTensor, may lie in this memory: who writes to that one writes here.
            self.escaped |= storages_of(known.values)
        if effects.kind is Kind.BARRIER:
            self._barrier(node)
        if effects.changes_views:
            self.out.unreadable |= storages_of(values_of(node.all_input_nodes))
        if effects.writes:
            now = next(self.clock)
            self.last_write.update(dict.fromkeys(effects.writes, now))
            self.out.writes.append(Write(now, effects.writes, node if self._is_followed(scope, node) else None))
            self.out.written |= effects.writes
            self.out.ends[node] = next(self.clock)  # its result is what it leaves behind

    def _is_followed(self, scope: Scope, node: fx.Node) -> bool:
        """Do gradients of what is written go through ``node``? Under ``no_grad`` they pass it by."""
        is_on = self.analysis.mode_of(scope.module, node).is_grad_on
        return is_on or not requires_grad([value_of(node), *values_of(node.all_input_nodes)])

    def _barrier(self, node: fx.Node) -> None:
        """Memory that others than this graph's operators may know of may have been written."""
        self.last_barrier = next(self.clock)
        operands = storages_of(values_of(node.all_input_nodes))
        self.escaped |= operands | storages_of(value_of(node))
        self.out.written |= self.escaped
        self.out.writes.append(Write(self.last_barrier, frozenset(self.escaped), None))
        self.out.ends[node] = next(self.clock)

    def _pure(self, known: KnownCall, effects: Effects) -> Number:
        node = known.node
        call = (effects.kind, node.op, node.target if effects.kind is Kind.PURE else "assert")
        # What an assertion says when it fails is no part of what it checks.
        given = known.arguments if effects.kind is Kind.PURE else Arguments.of((node.args[:1], {}))
        own = self._own_symbols(node) if known.unbacked else []
        described = (given.form, self._operands(given), self._versions(given))
        key = (call, described, self.mode, self.last_barrier, known.static or self._metadata(known.value, own))
        number = self.by_key.get(key)
        if number is None:
            self._note_separated(known, effects)
            number = self._number_of_key(key, node)
        else:
            for symbol, earlier in zip(own, self._own_symbols(self.results[number]) if own else (), strict=True):
                if symbol != earlier:
                    self.out.equal_symbols[symbol] = self._canonical(earlier)
        return number

    def _operands(self, given: Arguments) -> tuple[Any, ...]:
        return tuple([self.out.numbers.get(operand, operand) for operand in given.operands])

    def _versions(self, given: Arguments) -> tuple[tuple[int, int, int], ...]:
        """Of the memory that operands lie in, as far as it has been written."""
        if not self.last_write:
            return ()
        return tuple(
            (place, part, self.last_write[storage])
            for place, operand in enumerate(given.operands)
            for part, storage in enumerate(sorted(storages_of(value_of(operand))))
            if storage in self.last_write
        )

    def _own_symbols(self, node: fx.Node) -> list[Any]:
        """The unbacked symbols that come into being at this node."""
        inherited = set(map(self._canonical, unbacked_in(values_of(node.all_input_nodes))))
        return [s for s in unbacked_in(value_of(node)) if self._canonical(s) not in inherited]

    def _canonical(self, number: Any) -> Any:
        if isinstance(number, sympy.Basic) and number.free_symbols & self.out.equal_symbols.keys():
            return number.xreplace(self.out.equal_symbols)
        return number

    def _metadata(self, value: Any, own: list[Any]) -> Any:
        """Everything about a result but its contents; symbols that the node itself makes are numbered."""
        # Torch gives two calls on one tensor the same new symbol, which is known as an earlier one at the second.
        names = {self._canonical(symbol): sympy.Symbol(f"own{i}") for i, symbol in enumerate(own)}

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

    def _note_separated(self, known: KnownCall, effects: Effects) -> None:
        """Remember calls that look equal and are not, for the reasons that a pass reports."""
        node = known.node
        key = (node.op, node.target, known.arguments.form, self._operands(known.arguments))
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

    def _set(self, node: fx.Node, scope: Scope, number: Number, read: frozenset[StorageKey] = frozenset()) -> None:
        self.out.numbers[node] = number
        self._occurs(number, node, scope, read)

    def _occurs(self, number: Number, node: fx.Node, scope: Scope, read: frozenset[StorageKey] = frozenset()) -> None:
        last = max((self.last_write.get(storage, 0) for storage in read), default=0) if self.last_write else 0
        occurrence = Occurrence(node, scope, next(self.clock), max(last, self.last_barrier), self.mode)
        self.out.occurrences[number].append(occurrence)
        self.out.starts[node] = self.out.ends[node] = occurrence.time
