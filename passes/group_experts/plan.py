"""What stands for loops over experts that are proved: the reader gives it and the writer takes it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from glue_compiler.fx.flow import Refused
from glue_compiler.fx.operators import Value
from glue_compiler.fx.values import value_of
from glue_compiler.passes.group_experts.ends import Sink
from glue_compiler.passes.group_experts.pieces import PieceWrite
from glue_compiler.passes.group_experts.row_sets import RowSet
from glue_compiler.passes.group_experts.steps import Row, SlotWeight, Step
from glue_compiler.pipeline.results import Skip


class LeftAlone(Refused):
    """Why a loop is left alone; the node is the place, where it is not the loop's."""

    def skip_at(self, place: fx.Node) -> Skip:
        return Skip.at(self.node or place, self.reason)


# -- how rows are divided among the experts


@dataclass(frozen=True)
class RoutedRows:
    """A row for each slot of each token, of the expert that the slot selects: one sort puts them in order."""

    selected: fx.Node
    """``[tokens, top_k]``, or ``[tokens]`` for one slot."""
    routing: Value
    """What ``selected`` holds."""
    first_expert: int
    """The experts are those from this one on, ``num_experts`` of them."""
    num_experts: int

    @property
    def top_k(self) -> Any:
        shape = value_of(self.selected).shape
        return shape[1] if len(shape) == 2 else 1


@dataclass(frozen=True)
class SortedRows:
    """Rows that stand in the order of their experts already, those of expert 0 first."""

    counts: fx.Node
    """Integer vector; its first ``num_experts`` items are the experts' numbers of rows."""
    lengths: tuple[Any, ...]
    """The same numbers as the graph reads them, as sympy expressions."""
    source: fx.Node
    """A tensor of all rows."""
    must_check: bool
    """The counts are not proved to be those of all rows; what proves it at run time goes, so a check must stay."""
    has_rows: bool
    """Some expert has a row, whatever the routing."""
    numbers: frozenset[fx.Node]
    """What was read from the counts, with checks of it that cannot fail: they go if nothing else needs one of them."""

    first_expert: ClassVar[int] = 0

    @property
    def num_experts(self) -> int:
        return len(self.lengths)


# -- what becomes of the rows that the experts have computed


@dataclass(frozen=True)
class Combination:
    """They are added to an accumulator at their tokens, or assigned to it. Of :class:`RoutedRows`."""

    sinks: tuple[Sink, ...]
    """In graph order."""
    accumulator: fx.Node
    """What the first sink adds to."""
    starts_at_zero: bool
    """Nothing but the loop has touched the accumulator, which was made of zeros."""
    summed: Row
    """The step whose rows are summed, each times its weight in ``weights``, if that is not None."""
    weights: SlotWeight | None

    @property
    def place(self) -> fx.Node:
        return self.sinks[-1].node

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return tuple(sink.added for sink in self.sinks)

    @property
    def in_place(self) -> bool:
        return self.sinks[0].in_place

    @property
    def adds(self) -> bool:
        return self.sinks[0].adds


@dataclass(frozen=True)
class Concatenation:
    """They stay in order, joined by ``cat`` or written to the same rows of a fresh tensor. Of :class:`SortedRows`."""

    results: tuple[fx.Node, ...]
    """What each expert's body gives."""
    place: fx.Node
    """The ``cat``, or the last write."""
    writes: tuple[PieceWrite, ...]
    """Empty for a ``cat``."""

    @property
    def whole(self) -> fx.Node:
        """What holds the rows of all experts."""
        return self.writes[0].into if self.writes else self.place


@dataclass(frozen=True)
class RowIndices:
    """Nothing is computed: each expert's body stays, and finds the indices of its rows. Of :class:`RoutedRows`."""

    rows: tuple[RowSet, ...]
    """Of each expert from the first on."""

    results: ClassVar[tuple[fx.Node, ...]] = ()

    @property
    def place(self) -> fx.Node:
        return min(rows.root for rows in self.rows)

    @property
    def axes(self) -> tuple[str, ...]:
        """What each column of indices is."""
        return self.rows[0].mask.axes


Partition = RoutedRows | SortedRows
End = Combination | Concatenation | RowIndices


@dataclass(frozen=True)
class GroupedLoop:
    """A loop over experts that is proved to be one computation over the rows of all."""

    partition: Partition
    steps: tuple[Step, ...]
    """Compute the body for all rows, in order; none for :class:`RowIndices`."""
    end: End
    absorbed: frozenset[fx.Node]
    """What the loop consists of; these nodes go once nothing uses them."""

    @property
    def place(self) -> fx.Node:
        """Where the grouped form is written."""
        return self.end.place

    @property
    def num_experts(self) -> int:
        return self.partition.num_experts

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return self.end.sinks if isinstance(self.end, Combination) else ()

    @property
    def numbers(self) -> frozenset[fx.Node]:
        return self.partition.numbers if isinstance(self.partition, SortedRows) else frozenset()


@dataclass
class Plan:
    """The loops of one graph that are proved, and why others are left alone.

    ``alone``: experts that cannot be grouped with the others of their loop, each a loop of its own. That is enough to
    show that one without rows does nothing.
    """

    loops: list[GroupedLoop] = field(default_factory=list)
    alone: list[GroupedLoop] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
