"""Which values are computed more than once, or inside a checkpoint body without need, and may be computed once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.byte_sizes import with_unit
from glue_compiler.fx.effects import Effects, Kind
from glue_compiler.fx.value_numbering import Number, Numbering, Occurrence, Scope
from glue_compiler.fx.values import (
    is_call,
    makes_tensor,
    most_bytes,
    own_storages,
    producer_of,
    requires_grad,
    storages_of,
    tensors_in,
    unbacked_in,
    value_of,
    values_of,
)
from glue_compiler.pipeline.fuel import Fuel
from glue_compiler.pipeline.results import Skip


@dataclass(frozen=True)
class Lift:
    """Compute the value of ``number`` before the call that ``first`` is inside of.

    ``existing`` is the caller's own, earlier computation of it, if it has one. ``arguments`` gives for each operand of
    ``first`` the caller's node, or None where the operand is itself lifted. ``in_bodies`` are the computations that are
    replaced by an operand (empty for a value that is only needed to compute other lifted ones).
    """

    number: Number
    first: Occurrence
    existing: fx.Node | None
    arguments: dict[fx.Node, fx.Node | None]
    in_bodies: tuple[Occurrence, ...]


@dataclass
class HoistPlan:
    """What to rewrite in one graph (``scope``) and in the bodies called from it.

    ``merges``: for each duplicate what computes the same, an earlier node, or one that is lifted into the graph.
    """

    scope: Scope
    lifts: list[Lift] = field(default_factory=list)
    merges: dict[fx.Node, fx.Node] = field(default_factory=dict)
    equal_symbols: dict[Any, Any] = field(default_factory=dict)
    skips: list[Skip] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.lifts or self.merges)

    def symbols_gone(self) -> set[Any]:
        """The unbacked symbols of the nodes that go away."""
        return set(unbacked_in(values_of(self.replaced())))

    def replaced(self) -> dict[fx.Node, fx.Node]:
        """The nodes that go away, and for each the one that takes its place, or of which that is a copy."""
        return self.merges | {
            each.node: lift.existing or lift.first.node for lift in self.lifts for each in lift.in_bodies
        }


def plan_hoisting(numbering: Numbering, scope: Scope, byte_limit: int, shape_env: Any) -> HoistPlan:
    """Plan for ``scope`` and its direct children. Reads only.

    Args:
        byte_limit: the most bytes of a tensor that may be kept alive as an operand, unless it saves a host sync.
        shape_env: for the sizes of tensors with symbolic shapes; None when the graph has none.
    """
    return _Planner(numbering, scope, byte_limit, shape_env).run()


def limit_plan(plan: HoistPlan, fuel: Fuel) -> HoistPlan:
    """The part of ``plan`` that ``fuel`` allows: a beginning of it, because a rewrite builds on earlier ones.

    A single rewrite is one lift, or one duplicate that is merged.
    """
    lifts = fuel.allowed((f"lift {lift.first.node.name} out of a body", lift) for lift in plan.lifts)
    gone: set[fx.Node] = set()
    for node, keep in plan.merges.items():
        if node in gone or fuel.take(f"merge {node.name} into {keep.name}"):
            gone.add(node)
            # Torch's fake tensors know one symbol for what is read of one tensor: two readers must not remain.
            gone.update(user for user in node.users if user in plan.merges and own_symbols(user))
    merges = {node: keep for node, keep in plan.merges.items() if node in gone}
    limited = HoistPlan(plan.scope, list(lifts), merges, skips=plan.skips)
    symbols = limited.symbols_gone()
    limited.equal_symbols.update({symbol: to for symbol, to in plan.equal_symbols.items() if symbol in symbols})
    return limited


def own_symbols(node: fx.Node) -> set[Any]:
    """The unbacked symbols that come into being at a node."""
    inherited = set(unbacked_in(values_of(node.all_input_nodes)))
    return set(unbacked_in(value_of(node))) - inherited


def symbols_around(node: fx.Node) -> set[Any]:
    """The unbacked symbols of a node's value, of its operands, and of what reads it.

    Torch's fake tensors know one symbol for what is read of one tensor: two readers of it must not make two.
    """
    return set(unbacked_in(values_of((node, *node.all_input_nodes, *node.users))))


class _Planner:
    def __init__(self, numbering: Numbering, scope: Scope, byte_limit: int, shape_env: Any) -> None:
        self.numbering = numbering
        self.scope = scope
        self.byte_limit = byte_limit
        self.shape_env = shape_env
        self.plan = HoistPlan(scope)
        self.outer: dict[Number, list[Occurrence]] = {}
        self.inner: dict[Number, list[Occurrence]] = {}
        for number, occurrences in numbering.occurrences.items():
            if outer := [o for o in occurrences if o.scope is scope]:
                self.outer[number] = outer
            # A placeholder is no computation.
            if inner := [o for o in occurrences if o.scope.parent is scope and o.node.op != "placeholder"]:
                self.inner[number] = inner
        self.liftable: dict[Number, bool] = {}
        self.replaced: dict[Number, bool] = {}
        self.operands: set[Number] = set()
        self.lifted: set[Number] = set()
        self.new_nodes: dict[Number, fx.Node] = {}
        self.skips_of_size: dict[Number, Skip] = {}

    def run(self) -> HoistPlan:
        in_order = sorted(self.inner, key=lambda number: self.inner[number][0].time)
        self._choose_lifts(in_order)
        for number in in_order:
            if number in self.lifted:
                self._add_lift(number)
        for number, occurrences in self.outer.items():
            self._add_merge(number, occurrences)
        self._keep_readers_of_what_stays()
        self._add_symbols()
        self._report_separated()
        return self.plan

    def _choose_lifts(self, in_order: list[Number]) -> None:
        forbidden: set[Number] = set()
        self.operands.clear()
        while True:
            self.lifted.clear()
            self.skips_of_size.clear()
            for number in in_order:
                self.liftable[number] = number not in forbidden and self._may_lift(number)
            for number in reversed(in_order):
                self._decide(number)
            # A value that only one body computes, and goes on using, would be computed twice for one lifted user. It
            # becomes an operand, if it may be kept.
            twice = {n for n in self.lifted if not self.replaced[n] and not self._is_cheap(n) and self._places(n) < 2}
            if not twice:
                self.plan.skips.extend(self.skips_of_size.values())
                return
            small = {n for n in twice if self._may_be_kept(n)}
            self.operands |= small
            forbidden |= twice - small

    # -- may it be merged or moved at all

    def _hazard(self, occurrence: Occurrence) -> str | None:
        """Why this computation must stay as it is, or None."""
        node = occurrence.node
        kind = self.numbering.effects.get(node, Effects(Kind.NOTHING)).kind
        if node.op not in ("call_function", "call_method") or kind not in (Kind.PURE, Kind.ASSERT):
            return "not a pure operator"
        value = value_of(node)
        if requires_grad(value):
            return "it needs a gradient, and one sum of gradients in place of several is not bitwise the same"
        if storages_of(value) & self.numbering.written:
            return "its memory is written"
        # Two outputs must not become one object, nor share memory unless both are views of an input.
        is_output = isinstance(value, torch.Tensor) and any(user.op == "output" for user in node.users)
        if is_output or storages_of(value) & self.numbering.returned - self.numbering.inputs:
            return "the graph returns its memory, and two outputs must not share any"
        return None

    def _may_lift(self, number: Number) -> bool:
        first = self.inner[number][0]
        if any(self._hazard(occurrence) for occurrence in self.inner[number]):
            return False
        if first.last_write > first.scope.called_at or first.mode != first.scope.mode:
            return False
        # Outside, autograd may be on where it was off inside.
        reads_grad = requires_grad(values_of(first.node.all_input_nodes))
        floats = any(t.is_floating_point() or t.is_complex() for t in tensors_in(value_of(first.node)))
        if reads_grad and floats:
            return False
        return all(
            self.liftable.get(self.numbering.numbers[arg]) or self._caller_node(arg, first)
            for arg in first.node.all_input_nodes
        )

    def _caller_node(self, inner: fx.Node, user: Occurrence) -> fx.Node | None:
        """The caller's node with the value of ``inner``, if it comes before the call that ``user`` is inside of."""
        for outer in self.outer.get(self.numbering.numbers[inner], ()):
            same_memory = storages_of(value_of(outer.node)) == storages_of(value_of(inner))
            if outer.time < user.scope.called_at and (same_memory or not self._hazard(outer)):
                return outer.node
        return None

    # -- does it pay

    def _decide(self, number: Number) -> None:
        """Called in reverse order of execution: all users have been decided."""
        self.replaced[number] = False
        if not self.liftable[number]:
            return
        occurrences = self.inner[number]
        users = [user for o in occurrences for user in o.node.users]
        moved_users = [user for user in users if self.numbering.numbers.get(user) in self.lifted]
        if self._kind(number) is Kind.ASSERT:
            # It moves with the value that it checks, so that the recomputation in backward does not check again.
            self.replaced[number] = self._saves_sync(number)
        elif len(moved_users) == len(users):
            self.replaced[number] = bool(users)
        else:
            self.replaced[number] = number in self.operands or self._pays(number)
        if self.replaced[number] or moved_users:
            self.lifted.add(number)

    def _kind(self, number: Number) -> Kind:
        return self.numbering.effects[self.inner[number][0].node].kind

    def _saves_sync(self, number: Number) -> bool:
        """Is it read back from the device, or a host number that comes from such a value, or a check of one?"""
        node = producer_of(self.inner[number][0].node)
        if self.numbering.effects[node].syncs:
            return True
        if self._kind(number) is Kind.ASSERT:
            return bool(unbacked_in(values_of(node.all_input_nodes)))
        return not tensors_in(value_of(node)) and bool(unbacked_in(value_of(node)))

    def _is_cheap(self, number: Number) -> bool:
        """Costs nothing to compute again: a view, a size, an item of a tuple."""
        node = self.inner[number][0].node
        return not makes_tensor(node) or not own_storages(node)

    def _places(self, number: Number) -> int:
        """In how many graphs the value is computed: the caller's, and the bodies."""
        return len({o.scope for o in self.inner[number]}) + (number in self.outer)

    def _may_be_kept(self, number: Number) -> bool:
        value = value_of(self.inner[number][0].node)
        size = most_bytes(value, self.shape_env) if isinstance(value, torch.Tensor) else None
        return size is not None and size <= self.byte_limit

    def _pays(self, number: Number) -> bool:
        node = self.inner[number][0].node
        value = value_of(node)
        if isinstance(value, tuple | list):  # no operand; its items are
            return False
        if self._saves_sync(number):
            return True
        if self._is_cheap(number) or self._places(number) < 2:
            return False
        size = most_bytes(value, self.shape_env)
        if size is None or size > self.byte_limit:
            shown = "an unknown number of bytes" if size is None else with_unit(size)
            reason = (
                f"equal in {self._places(number)} graphs, but keeping it takes {shown}, more than the hoist_limit of "
                f"{with_unit(self.byte_limit)}; a larger limit would move it out of the checkpoint bodies"
            )
            self.skips_of_size[number] = Skip.at(node, reason)
            return False
        return True

    # -- the plan

    def _add_lift(self, number: Number) -> None:
        occurrences = self.inner[number]
        first = occurrences[0]
        existing = self._caller_node(first.node, first)
        arguments = {arg: self._caller_node(arg, first) for arg in first.node.all_input_nodes}
        replaced = tuple(occurrences) if self.replaced[number] else ()
        self.plan.lifts.append(Lift(number, first, existing, arguments, replaced))
        if existing is None:
            self.new_nodes[number] = first.node

    def _add_merge(self, number: Number, occurrences: list[Occurrence]) -> None:
        computed = [o for o in occurrences if is_call(o.node)]
        lifted_earlier = self.new_nodes.get(number)
        if len(computed) + (lifted_earlier is not None) < 2:
            return
        hazards = {o: self._hazard(o) for o in computed}
        safe = [o.node for o in computed if not hazards[o]]
        for occurrence in computed[1:]:
            reason = hazards[occurrence]
            if reason and reason != "not a pure operator":
                self._skip(occurrence.node, f"equal to '{computed[0].node.name}' and computed again: {reason}")
        if lifted_earlier is not None:
            self.plan.merges |= dict.fromkeys(safe, lifted_earlier)
        elif safe:
            self.plan.merges |= dict.fromkeys(safe[1:], safe[0])

    def _keep_readers_of_what_stays(self) -> None:
        """What is computed again keeps the symbols that it makes, so what is made of those is no duplicate either.

        Nor is what has other symbols than the node that it repeats once all that is replaced is gone: what both are
        made of is equal, but is not one. Nor is a tensor one of whose readers stays and makes a symbol, as ``x[mask]``
        does, where a reader of the other makes another: torch's fake tensors know one for what is read of one tensor.
        """
        nodes = [node for scope in (self.scope, *self.scope.children) for node in scope.graph.nodes]
        renamed = self.numbering.equal_symbols.keys()
        makers = [(symbol, node) for node in nodes for symbol in own_symbols(node) & renamed]
        while True:
            gone, kept = self.plan.replaced(), self._kept_symbols()
            staying = {symbol for symbol, maker in makers if maker not in gone}
            equal: dict[fx.Node, list[fx.Node]] = {}
            for node, keep in self.plan.merges.items():
                equal.setdefault(keep, [keep]).append(node)
            merges = {
                node: keep
                for node, keep in self.plan.merges.items()
                if staying.isdisjoint(symbols_around(node))
                and not self._has_symbols_of_its_own(node, equal[keep], gone)
                and all(kept.get(s, s) == kept.get(k, k) for s, k in self._equal_symbols(node, keep).items())
            }
            if merges == self.plan.merges:
                return
            self.plan.merges = merges

    @staticmethod
    def _has_symbols_of_its_own(node: fx.Node, equal: Collection[fx.Node], gone: Collection[fx.Node]) -> bool:
        """Do readers of ``node`` that stay make other symbols than those of the ``equal`` nodes?"""

        def made(of: fx.Node) -> set[Any]:
            return {symbol for user in of.users if user not in gone for symbol in own_symbols(user)}

        others = {symbol for other in equal if other is not node for symbol in made(other)}
        own = made(node)
        return bool(own) and bool(others - own)

    def _kept_symbols(self) -> dict[Any, Any]:
        """The symbols that go away with the nodes that make them, and those that take their place."""
        found: dict[Any, Any] = {}
        for node, survivor in self.plan.replaced().items():
            equal = self._equal_symbols(node, survivor)
            found.update({symbol: equal[symbol] for symbol in own_symbols(node) & equal.keys()})
        return found

    def _equal_symbols(self, node: fx.Node, survivor: fx.Node) -> dict[Any, Any]:
        """The symbols of a node's value, and those of an equal value that stand for the same numbers."""
        first = self.numbering.equal_symbols
        there = {first.get(symbol, symbol): symbol for symbol in unbacked_in(value_of(survivor))}
        here = unbacked_in(value_of(node))
        return {symbol: there[first.get(symbol, symbol)] for symbol in here if first.get(symbol, symbol) in there}

    def _add_symbols(self) -> None:
        """Symbols of the nodes that go away, unless torch had given both the same one."""
        kept = self._kept_symbols()
        for symbol in sorted(self.plan.symbols_gone() & self.numbering.equal_symbols.keys(), key=str):
            survivor = kept.get(symbol, self.numbering.equal_symbols[symbol])
            if survivor != symbol:
                self.plan.equal_symbols[symbol] = survivor

    def _report_separated(self) -> None:
        in_view = {self.scope, *self.scope.children}
        where = {o.node: o.scope for occurrences in self.numbering.occurrences.values() for o in occurrences}
        for node, earlier, reason in self.numbering.separated:
            if where.get(node) in in_view and where.get(earlier) in in_view and not requires_grad(value_of(node)):
                self._skip(node, f"the same call as '{earlier.name}', but {reason}")

    def _skip(self, node: fx.Node, reason: str) -> None:
        self.plan.skips.append(Skip.at(node, reason))
