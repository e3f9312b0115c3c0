"""The fastest predicted way to keep, recompute or move the values of a step within a budget of bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes.plan_memory.choose import Choice, Chooser, Prices
from glue_compiler.passes.plan_memory.moves import fill_link, worth_of
from glue_compiler.passes.plan_memory.predict import Predictor
from glue_compiler.passes.plan_memory.segments import segmentations
from glue_compiler.passes.plan_memory.step import TrainingStep

MOVES = ("full", "nothing", "saved")
"""What waits on the host, in the order in which plans are looked at: as much as the link copies, for which more is
saved; nothing; or, which takes the least memory, of what is saved anyway."""
ROUNDS = 2
"""So many times the link's room is filled anew, when what was to be moved turns out not to be saved."""
SPLITS = 8
"""So many times the border between values of two prices is moved by half of what is left."""
SECONDS = 10.0
"""For so long plans are looked for. What is under way then is finished."""


@dataclass(frozen=True)
class MemoryPlan:
    """What to do with the values of a step, by place.

    Attributes:
        saved: the forward keeps them for backward; of these, ``moved`` wait on the host.
        recomputed: backward computes them again.
        segments: by place, the segment of each.
        seconds, peak: of a step, predicted; bytes of the device. kept: of these, what waits there for backward.
        least_seconds: no plan that was looked at is faster, at any budget. least_peak: none takes less.
        looked_at: how many that were; ``is_cut``: there was no time for the others.
    """

    saved: frozenset[int]
    moved: frozenset[int]
    recomputed: frozenset[int]
    segments: Mapping[int, int]
    seconds: float
    peak: int
    kept: int = 0
    least_seconds: float = math.inf
    least_peak: int = 0
    looked_at: int = 1
    is_cut: bool = False

    def held(self, waiting: int) -> int:
        """The peak, where so many other calls of graphs that keep as much wait for their backward."""
        return self.peak + waiting * self.kept


def plan_memory(
    step: TrainingStep,
    rates: Rates,
    budget: int,
    may_move: Collection[int],
    *,
    fuses: bool = True,
    waiting: int = 0,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> MemoryPlan:
    """The fastest plan found whose predicted peak is at most ``budget``; if there is none, the one of the lowest peak.

    There is a price for what is saved: for each price the choice is exact (a minimum cut). Between two prices, one of
    which fits, values up to some border pay the higher one: the later ones are needed first in backward, so those are
    kept.

    Args:
        waiting: so many other calls hold what a plan keeps, and this counts in its peak.
        seconds: by ``clock``; what is best then is taken. One plan is always made, and the first ones are those that
            save least.
    """
    end = clock() + seconds
    found: list[MemoryPlan] = []
    is_cut = False
    for plan in _plans(step, rates, budget, may_move, fuses, waiting):
        found.append(plan)
        if is_cut := clock() >= end:
            break

    def rank(plan: MemoryPlan) -> tuple[bool, float, float]:
        """What fits comes first, by its time; of what does not, what takes the least memory."""
        held = plan.held(waiting)
        return (False, plan.seconds, plan.peak) if held <= budget else (True, held, plan.seconds)

    return dataclasses.replace(
        min(found, key=rank),
        least_seconds=min(plan.seconds for plan in found),
        least_peak=min(plan.peak for plan in found),
        looked_at=len(found),
        is_cut=is_cut,
    )


@dataclass(frozen=True)
class _Planner:
    """Plans over one way to cut the forward into segments.

    Attributes:
        prices: from nothing on, at which choices are made.
        may_move: what could wait on the host; moves: of that, see ``MOVES``.
        waiting: as for :func:`plan_memory`.
    """

    chooser: Chooser
    predictor: Predictor
    prices: Sequence[float]
    may_move: Collection[int]
    moves: str
    waiting: int

    def plan(self, prices: Prices) -> MemoryPlan:
        choice, moved = self.chooser.choose(prices), frozenset[int]()
        if self.moves == "saved":
            moved = self._fill(choice, dict.fromkeys(choice.saved, 0.0))
        elif self.moves == "full":
            choice, moved = self._with_moves(prices, choice)
        found = self.predictor.predict(choice, moved)
        values = self.chooser.step.values
        kept = sum(values[place].nbytes for place in choice.saved - moved)
        return MemoryPlan(choice.saved, moved, choice.recomputed, self.chooser.home, found.seconds, found.peak, kept)

    def _with_moves(self, prices: Prices, choice: Choice) -> tuple[Choice, frozenset[int]]:
        """What is moved pays no price, so that more is saved, which leaves something else to be moved."""
        worth, free = dict(self._worth), frozenset[int]()
        for _ in range(ROUNDS):
            free = self._fill(choice, worth)
            choice = self.chooser.choose(dataclasses.replace(prices, free=free))
            if not (unsaved := free - choice.saved):
                break
            for place in unsaved:
                del worth[place]
        groups = self.predictor.groups(choice)
        return choice, frozenset(place for place in free & choice.saved if place in groups)

    def _fill(self, choice: Choice, worth: Mapping[int, float]) -> frozenset[int]:
        groups = self.predictor.groups(choice)
        movable = {place: groups[place] for place in groups if place in self.may_move}
        times, waits = self.predictor.times(choice), self.waiting > 0
        return fill_link(self.chooser.step, movable, worth, times, self.predictor.rates, waits=waits)

    @functools.cached_property
    def _worth(self) -> Mapping[int, float]:
        return worth_of((price, self.chooser.choose(Prices(price))) for price in self.prices)

    def between(
        self, lower: tuple[float, MemoryPlan], higher: tuple[float, MemoryPlan], budget: int
    ) -> Iterator[MemoryPlan]:
        """Two prices with their plans, of which that of the higher one fits: the fewest values, from the first on, pay
        that so that the rest fits, by halving."""
        price, kept = lower
        borders = sorted(kept.saved - higher[1].saved)
        fits, over = len(borders), 0
        for _ in range(SPLITS):
            middle = (fits + over) // 2
            if middle in (fits, over):
                return
            found = self.plan(Prices(price, borders[middle], higher[0]))
            yield found
            fits, over = (middle, over) if found.held(self.waiting) <= budget else (fits, middle)


def _plans(
    step: TrainingStep, rates: Rates, budget: int, may_move: Collection[int], fuses: bool, waiting: int
) -> Iterator[MemoryPlan]:
    prices = _prices(step, rates)
    planners: list[_Planner] = []
    for segments in segmentations(step):
        chooser = Chooser(step, segments, rates.memory)
        predictor = Predictor(step, chooser.home, rates, fuses=fuses)
        ways = {
            moves: _Planner(chooser, predictor, prices, may_move, moves, waiting)
            for moves in (MOVES if may_move else ("nothing",))
        }
        planners += ways.values()
        # If there is no time for more: what takes little memory, and what keeps all.
        for planner, price in ((planners[-1], prices[-1]), (ways["nothing"], prices[0])):
            yield planner.plan(Prices(price))
    for planner in sorted(planners, key=lambda planner: MOVES.index(planner.moves)):
        at_price = {}
        for price in reversed(prices):
            at_price[price] = planner.plan(Prices(price))
            yield at_price[price]
        for price, higher in pairwise(prices):
            if at_price[price].held(waiting) > budget >= at_price[higher].held(waiting):
                yield from planner.between((price, at_price[price]), (higher, at_price[higher]), budget)


def _prices(step: TrainingStep, rates: Rates) -> list[float]:
    """Seconds for a saved byte: from none, over a tenth of what writing one takes, to all that computing one does."""
    highest = max((value.seconds / value.nbytes for value in step.values if value.nbytes), default=0.0)
    prices = [0.0, 0.1 / rates.memory]
    while prices[-1] < 2 * highest:
        prices.append(2 * prices[-1])
    return prices
