"""The fastest predicted way to keep, recompute or move the values of a step within a budget of bytes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes.plan_memory.choose import Chooser
from glue_compiler.passes.plan_memory.predict import Predictor
from glue_compiler.passes.plan_memory.segments import segmentations
from glue_compiler.passes.plan_memory.step import Step

SPLITS = 6
"""So many times the border between segments of two prices is moved by half of what is left."""
SECONDS = 10.0
"""For so long plans are looked for. What is under way then is finished."""


@dataclass(frozen=True)
class Plan:
    """What to do with the values of a step, by place.

    Attributes:
        saved: the forward keeps them for backward; of these, ``moved`` wait on the host.
        recomputed: backward computes them again.
        segments: by place, the segment of each.
        seconds, peak: of a step, predicted; bytes of the device.
        least_seconds: no plan that was looked at is faster, at any budget.
        looked_at: how many that were; ``is_cut``: there was no time for the others.
    """

    saved: frozenset[int]
    moved: frozenset[int]
    recomputed: frozenset[int]
    segments: Mapping[int, int]
    seconds: float
    peak: int
    least_seconds: float = math.inf
    looked_at: int = 1
    is_cut: bool = False


def plan_memory(
    step: Step,
    rates: Rates,
    budget: int,
    may_move: Collection[int],
    *,
    fuses: bool = True,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """The fastest plan found whose predicted peak is at most ``budget``; if there is none, the one of the lowest peak.

    Every segment pays a price for what it saves: for each price the choice is exact (a minimum cut). Between
    two prices, one of which fits, segments up to some border pay the higher one: the later ones' values are needed
    first in backward, so theirs are kept.

    Args:
        seconds: by ``clock``; what is best then is taken. One plan is always made, and the first ones are those that
            save least.
    """
    end = clock() + seconds
    plans: list[Plan] = []
    is_cut = False
    for plan in _plans(step, rates, budget, may_move, fuses):
        plans.append(plan)
        if is_cut := clock() >= end:
            break
    least = min(plan.seconds for plan in plans)
    fitting = [plan for plan in plans if plan.peak <= budget]
    best = min(fitting, key=_by_time) if fitting else min(plans, key=lambda plan: (plan.peak, plan.seconds))
    return dataclasses.replace(best, least_seconds=least, looked_at=len(plans), is_cut=is_cut)


def _by_time(plan: Plan) -> tuple[float, int]:
    return plan.seconds, plan.peak


@dataclass(frozen=True)
class _Planner:
    """Plans over one way to cut the forward into segments. ``moves``: may values wait on the host?"""

    chooser: Chooser
    predictor: Predictor
    moves: bool

    def plan(self, prices: Mapping[int, float], default: float) -> Plan:
        """Segments pay ``prices``, those without one ``default``."""
        choice = self.chooser.choose(prices, default)
        found = self.predictor.predict(choice, self.moves)
        return Plan(choice.saved, found.moved, choice.recomputed, self.chooser.home, found.seconds, found.peak)

    def between(self, price: float, higher: float, budget: int) -> Iterator[Plan]:
        """The fewest segments, from the first on, pay the higher price that make the rest fit: by halving."""
        fits, over = max(self.chooser.home.values(), default=0) + 1, 0
        for _ in range(SPLITS):
            middle = (fits + over) // 2
            if middle in (fits, over):
                return
            found = self.plan(dict.fromkeys(range(middle), higher), price)
            yield found
            fits, over = (middle, over) if found.peak <= budget else (fits, middle)


def _plans(step: Step, rates: Rates, budget: int, may_move: Collection[int], fuses: bool) -> Iterator[Plan]:
    prices = _prices(step, rates)
    planners = []
    for segments in segmentations(step):
        chooser = Chooser(step, segments, rates.memory)
        predictor = Predictor(step, chooser.home, rates, may_move, fuses=fuses)
        planners += [_Planner(chooser, predictor, moves) for moves in ((False, True) if may_move else (False,))]
        yield planners[-1].plan({}, prices[-1])  # if there is no time for more: what takes little memory
    for planner in planners:
        at_price = {}
        for price in reversed(prices):
            at_price[price] = planner.plan({}, price)
            yield at_price[price]
        for price, higher in pairwise(prices):
            if at_price[price].peak > budget >= at_price[higher].peak:
                yield from planner.between(price, higher, budget)


def _prices(step: Step, rates: Rates) -> list[float]:
    """Seconds for a saved byte: from none, over a tenth of what writing one takes, to all that computing one does."""
    highest = max((value.seconds / value.nbytes for value in step.values if value.nbytes), default=0.0)
    prices = [0.0, 0.1 / rates.memory]
    while prices[-1] < 2 * highest:
        prices.append(2 * prices[-1])
    return prices
