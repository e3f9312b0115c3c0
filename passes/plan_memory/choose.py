"""What a segment saves and what it recomputes, at a price for a saved byte: a minimum cut.

Source: the cut is the one of torch's partitioner (Horace He, "min-cut rematerialization"), with the time of each
recomputation as a capacity where that one has bans: see ``_edges``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx
from networkx.algorithms.flow import boykov_kolmogorov

from glue_compiler.passes.plan_memory.segments import Segments
from glue_compiler.passes.plan_memory.step import TrainingStep, ancestors

ALWAYS = float("inf")
SOURCE, SINK = "source", "sink"
UNIT = 1e-15
"""Seconds: what is cut is counted in these."""
INLINED = 0.1
"""What it costs to compute a pointwise value inside of the kernel that reads it, as a share of the time to write it.
Reading its operands is paid for where those are saved."""

Edge = tuple[Any, Any, float]
Cut = tuple[frozenset[int], frozenset[int]]
"""Indices of what is saved and of what is recomputed."""


@dataclass(frozen=True)
class Prices:
    """Seconds that a saved byte costs: ``price``, and ``higher`` for values at places in front of ``border``; nothing
    for those that are ``free``, because they wait on the host."""

    price: float
    border: int = 0
    higher: float = 0.0
    free: frozenset[int] = frozenset()

    def of(self, places: Sequence[int], read: Collection[int]) -> Prices:
        """The same for these places, in order, with what they ``read``, alone: one price, where all pay the same."""
        free = self.free and frozenset(place for place in (*places, *read) if place in self.free)
        if not places or places[0] >= self.border:
            return Prices(self.price, free=free)
        if places[-1] < self.border:
            return Prices(self.higher, free=free)
        return Prices(self.price, self.border, self.higher, free)

    def at(self, place: int) -> float:
        if place in self.free:
            return 0.0
        return self.higher if place < self.border else self.price


@dataclass(frozen=True)
class Choice:
    """Places of what the forward saves for backward, and of what backward computes again."""

    saved: frozenset[int]
    recomputed: frozenset[int]


@dataclass
class Chooser:
    """Cuts one step, segment by segment; equal segments at equal prices are cut once.

    ``memory``: bytes a second that the device reads or writes.
    """

    step: TrainingStep
    segments: Segments
    memory: float
    _cuts: dict[Any, Cut] = field(default_factory=dict)
    _at_price: dict[tuple[int, Prices], tuple[set[int], set[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = self.step.values
        # What backward needs, and all that it could be computed from.
        self._relevant = {place for place in ancestors(self.step.needed, values) if not values[place].is_input}
        self._home: dict[int, int] = {}
        for place in sorted(self._relevant):
            # What only backward needs belongs where its operands do.
            behind = max((self._home.get(read, 0) for read in values[place].inputs), default=0)
            self._home[place] = self.segments.get(place, behind)
        self._readers: dict[int, set[int]] = {}
        for place in sorted(self._relevant):
            for read in values[place].inputs:
                if read in self._relevant:
                    self._readers.setdefault(values[read].root, set()).add(self._home[place])
        self._crossing = {
            root for root, homes in self._readers.items() if root in self._home and homes - {self._home[root]}
        }
        self._members: dict[int, list[int]] = {}
        for place in sorted(self._relevant):
            self._members.setdefault(self._home[place], []).append(place)
        self._outside = {number: self._read_from_outside(members) for number, members in self._members.items()}

    @property
    def home(self) -> Mapping[int, int]:
        """The segment of each value that backward may need."""
        return self._home

    def choose(self, prices: Prices) -> Choice:
        """The cheapest choice at these prices."""
        saved: set[int] = set()
        recomputed: set[int] = set()
        for number, members in self._members.items():
            own = prices.of(members, self._outside[number])
            if (number, own) not in self._at_price:
                self._at_price[number, own] = self._cut(number, own)
            kept, again = self._at_price[number, own]
            saved |= kept
            recomputed |= again
        return Choice(frozenset(saved), frozenset(recomputed - saved))

    def _cut(self, number: int, prices: Prices) -> tuple[set[int], set[int]]:
        members, outside = self._members[number], self._outside[number]
        names = (*outside, *members)
        local = {place: index for index, place in enumerate(names)}
        edges = tuple(self._edges(members, outside, local, prices))
        if edges not in self._cuts:
            self._cuts[edges] = _minimum_cut(edges)
        kept, again = self._cuts[edges]
        saved = {names[index] for index in kept}
        computed = {names[index] for index in again if index >= len(outside)} - saved
        views = self._views_read_by(computed)
        # Elements of what an operator returns as a list lie in no memory that is there by another name.
        elements = {place for place in views if self.step.is_element(place)}
        elements = {place for place in elements if self.step.values[place].root not in computed}
        return saved | elements, computed | (views - elements)

    def _read_from_outside(self, members: Sequence[int]) -> list[int]:
        read = {self._memory_of(place) for m in members for place in self.step.values[m].inputs}
        return sorted(place for place in read - set(members) if place is not None)

    def _memory_of(self, place: int) -> int | None:
        """A view of what lies outside is there when its memory is; None for what always is."""
        root = self.step.values[place].root
        return None if self.step.values[root].is_input or root not in self._relevant else root

    def _views_read_by(self, places: Collection[int]) -> set[int]:
        """Views in other segments, each made again from its memory."""
        values, found = self.step.values, set[int]()
        waiting = [read for place in places for read in values[place].inputs]
        while waiting:
            read = waiting.pop()
            if values[read].root != read and read not in found and read not in places:
                found.add(read)
                waiting += values[read].inputs
        return found

    def _edges(
        self,
        members: Sequence[int],
        outside: Sequence[int],
        local: Mapping[int, int],
        prices: Prices,
    ) -> list[Edge]:
        """``i`` → ``~i``: the price of saving a value. Source → ``i``: the time to compute it again.

        A value on the sink's side is there in backward: saved, if its edge is cut, and recomputed otherwise.
        """
        edges: list[Edge] = []
        own = set(members)

        for place in outside:
            # A border value is paid for by each segment that reads it, in parts.
            share = max(1, len(self._readers.get(self.step.values[place].root, ())))
            price = self._price(place, prices.at(place)) / share
            edges += [(SOURCE, local[place], ALWAYS), (local[place], ~local[place], price)]
        for place in members:
            value, index = self.step.values[place], local[place]
            again = ALWAYS if not value.may_recompute or place in self._crossing else self._again(place)
            if value.is_symbol:
                again = 0.0
            if again:
                edges.append((SOURCE, index, again))
            edges.append((index, ~index, self._price(place, prices.at(place))))
            needed = {read if read in own else self._memory_of(read) for read in value.inputs}
            edges += [(~local[operand], index, ALWAYS) for operand in sorted(n for n in needed if n is not None)]
            if place in self.step.needed:
                edges.append((~index, SINK, ALWAYS))
        return edges

    def _again(self, place: int) -> float:
        value = self.step.values[place]
        is_inlined = value.is_pointwise and place not in self.step.realised
        return value.seconds * (INLINED if is_inlined else 1.0)

    def _price(self, place: int, price: float) -> float:
        value = self.step.values[place]
        if value.is_input or value.is_symbol:
            return 0.0
        if not value.may_save or (value.must_recompute and place not in self._crossing):
            return ALWAYS
        nbytes = value.nbytes
        # Read in backward; written only for it, if no kernel of the forward needs it in memory.
        traffic = nbytes * (1 if place in self.step.realised else 2) / self.memory
        return price * nbytes + traffic + 1e-12


def _minimum_cut(edges: Sequence[Edge]) -> Cut:
    graph = networkx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for tail, head, seconds in edges:
        # Whole numbers: sums of floats are rounded, and an edge that is almost full is none of the cut.
        graph.add_edge(tail, head, capacity=seconds if seconds == ALWAYS else round(seconds / UNIT))
    _, (before, after) = networkx.minimum_cut(graph, SOURCE, SINK, flow_func=boykov_kolmogorov)
    assert not any(seconds == ALWAYS and tail in before and head in after for tail, head, seconds in edges)
    saved = frozenset(
        tail for tail, head, _ in edges if isinstance(tail, int) and head == ~tail and tail in before and head in after
    )
    recomputed = frozenset(index for index in after if isinstance(index, int) and index >= 0)
    return saved, recomputed
