"""Which saved values wait on the host: as many as the link copies while the device computes.

What backward needs of a segment is copied out while the forward of the segment behind it computes, and back while that
one's backward does (``overlap_offload`` schedules it so). The link's room is given to what is dear to compute again, so
that it never stays empty for want of something that is saved anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes.plan_memory.choose import Choice
from glue_compiler.passes.plan_memory.step import TrainingStep

LEAST = 0.5e-3
"""Seconds that copying takes at least for a value to be worth it: several times what its start and wait cost."""
MOVING = 0.02
"""Seconds that a second of copying beside compute costs, for both read the same memory."""


@dataclass(frozen=True)
class Times:
    """Seconds of each segment, in ``forward`` and in ``backward``, where it computes its values again."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]

    def hides(self, number: int) -> float:
        """Seconds that what is copied for this segment may take, out and back: the segment behind it computes then."""
        return min(self.forward.get(number + 1, 0.0), self.backward.get(number + 1, 0.0))


def worth_of(choices: Iterable[tuple[float, Choice]]) -> Mapping[int, float]:
    """By place, the highest price of a saved byte at which it is saved: seconds a byte that computing it again takes.

    Args:
        choices: at each price.
    """
    found: dict[int, float] = {}
    for price, choice in choices:
        for place in choice.saved:
            found[place] = max(price, found.get(place, 0.0))
    return found


def fill_link(
    step: TrainingStep,
    groups: Mapping[int, int],
    worth: Mapping[int, float],
    times: Times,
    rates: Rates,
    *,
    waits: bool,
) -> frozenset[int]:
    """What would wait on the host if all of it were saved.

    In each segment but the last two, which backward needs at once, values of the highest worth come first, as long as
    their copies take no more than the time in which they are hidden.

    Args:
        waits: other calls wait between this one's forward and its backward, which then needs only the last at once.
        groups: by place, the segment whose values it is moved with; what is not there may not move.
        worth: see :func:`worth_of`; what has none is never saved.
    """
    last = max(times.forward, default=0)
    room = {number: times.hides(number) * rates.link for number in times.forward if number < last - (not waits)}
    found: set[int] = set()
    for place in sorted(worth, key=lambda p: (-worth[p], -step.values[p].nbytes, p)):
        nbytes, number = step.values[place].nbytes, groups.get(place)
        if number is not None and LEAST * rates.link <= nbytes <= room.get(number, 0.0):
            room[number] -= nbytes
            found.add(place)
    return frozenset(found)


def copying_seconds(
    step: TrainingStep, groups: Mapping[int, int], moved: Collection[int], times: Times, rates: Rates
) -> float:
    """What ``moved`` adds to a step: the waits of a simulated one, and what copies take from compute beside them."""
    nbytes: dict[int, int] = {}
    for place in moved:
        nbytes[groups[place]] = nbytes.get(groups[place], 0) + step.values[place].nbytes
    if not nbytes:
        return 0.0
    computing = sum(times.forward.values()) + sum(times.backward.get(number, 0.0) for number in times.forward)
    waits = step_seconds(times, {number: size / rates.link for number, size in nbytes.items()}) - computing
    return max(0.0, waits) + MOVING * 2 * sum(nbytes.values()) / rates.link


def step_seconds(times: Times, copying: Mapping[int, float]) -> float:
    """Of a step whose copies run beside compute, one after the other in each direction.

    A copy to the host starts behind its segment's forward, and compute waits for it behind the next segment's. The copy
    back starts with the backward of the segment behind, and compute waits for it in front of its segment's own.

    Args:
        copying: by segment, the seconds that copying its values takes in one direction.
    """
    compute = to_host = from_host = under_way = 0.0
    there: dict[int, float] = {}
    back: dict[int, float] = {}
    for number, seconds in sorted(times.forward.items()):
        compute += seconds
        before, under_way = under_way, 0.0
        if number in copying:
            under_way = to_host = there[number] = max(compute, to_host) + copying[number]
        compute = max(compute, before)
    order = sorted(times.forward, reverse=True)
    for number, following in zip_longest(order, order[1:]):
        for each in (number, following):
            if each in copying and each not in back:
                from_host = back[each] = max(compute, from_host, there[each]) + copying[each]
            compute = max(compute, back.get(number, 0.0))
        compute += times.backward.get(number, 0.0)
    return compute
