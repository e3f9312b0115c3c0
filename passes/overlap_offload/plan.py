"""Which checkpointed regions' inputs to move to the host: a pure function of sizes, times and limits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from typing import Literal

from glue_compiler.passes.overlap_offload.simulator import Event, Link, Region, Timeline, simulate

__all__ = ["Event", "Link", "OffloadPlan", "Region", "Timeline", "plan_offload", "worst_peak"]

# Every choice among so many regions of different sizes is tried: at most 4096.
EXACT_REGIONS = 12


@dataclass(frozen=True)
class OffloadPlan:
    """What to move.

    Attributes:
        moved: indices of the regions whose saved input goes to the host, in the order of the forward.
        buffers: the most copies in flight, and the most reloaded inputs alive.
        predicted: the overlapped schedule of this plan, simulated; None where no link or no times are known.
        reason: why these, for people.
        peak_bytes: the most bytes on the device, ``base_bytes`` included, however long copies and compute take.
    """

    moved: tuple[int, ...]
    buffers: int
    predicted: Timeline | None
    reason: str
    peak_bytes: int


def plan_offload(
    regions: Sequence[Region],
    link: Link | None,
    *,
    policy: Literal["all", "budget"],
    base_bytes: int = 0,
    budget: int | None = None,
    buffers: int = 2,
    required: Collection[int] = (),
) -> OffloadPlan:
    """Choose the regions to move.

    The last region is never moved, backward needs its input at once; nor is an input of no bytes. The policy "all"
    moves all others. The policy "budget" moves the fewest bytes that bring ``worst_peak`` to the budget, which holds
    however wrong the regions' times are. The choice is exact for regions of one size, and for up to ``EXACT_REGIONS``
    of several sizes; for more of several sizes no chosen region can be left out, but another choice could be smaller.
    When the budget cannot be met, the fewest bytes that reach the lowest possible peak are moved, and ``reason`` says
    by how much that is over.

    Args:
        regions: in the order of the forward. Their seconds are for the prediction alone, and may all be 0: not known.
        link: for the prediction alone; None when it is not known.
        base_bytes: everything on the device but the saved inputs, when most of it is there.
        budget: bytes, for the policy "budget".
        buffers: see ``OffloadPlan``.
        required: indices of regions that move whatever the policy says, the last one too.

    Raises:
        ValueError: the policy "budget" without a budget, ``buffers`` below 1, or two regions of one index.
    """
    if len({region.index for region in regions}) < len(regions):
        raise ValueError("two regions have the same index")
    fixed = frozenset(required)
    movable: Sequence[Region] = [r for r in regions[:-1] if r.nbytes and r.index not in fixed]
    if policy == "all":
        moved, reason = movable, "every region's input but the last, which backward needs at once"
        if not movable and not fixed:
            reason = "nothing to move: only the last region has a saved input, which backward needs at once"
    elif budget is None:
        raise ValueError('the policy "budget" needs a budget in bytes')
    else:
        moved, reason = _within_budget(regions, movable, budget - base_bytes, buffers, fixed)
    chosen = fixed.union(region.index for region in moved)
    indices = tuple(region.index for region in regions if region.index in chosen)
    predicted = None
    if link is not None and any(region.forward_seconds + region.backward_seconds for region in regions):
        predicted = simulate(regions, link, indices, "overlapped", buffers=buffers, base_bytes=base_bytes)
    peak = worst_peak(regions, indices, buffers=buffers, base_bytes=base_bytes)
    return OffloadPlan(moved=indices, buffers=buffers, predicted=predicted, reason=reason, peak_bytes=peak)


def worst_peak(regions: Sequence[Region], moved: Collection[int], *, buffers: int = 2, base_bytes: int = 0) -> int:
    """The most bytes on the device at one time under the overlapped schedule, whatever times copies and compute take.

    In forward, at the end of a region and in slow copying: all inputs so far are there, with the one just produced, but
    those moved and copied, which leaves out this region's and the one's before it. In backward: the inputs that stayed
    and are still needed, and of the moved ones the region's own and the following one's. To each comes what else the
    region's forward or backward holds, and ``base_bytes``.

    Raises:
        ValueError: ``buffers`` below 1.
    """
    if buffers < 1:
        raise ValueError(f"a schedule needs at least one buffer, not {buffers}")
    alive = peak = regions[0].nbytes if regions else 0
    under_way = 0
    for region, following in zip_longest(regions, regions[1:]):
        alive += following.nbytes if following else 0
        peak = max(peak, alive + region.forward_base)
        alive -= under_way
        under_way = region.nbytes if region.index in moved else 0
    staying = sum(region.nbytes for region in regions if region.index not in moved)
    backward = regions[::-1]
    for region, following in zip_longest(backward, backward[1:]):
        reloaded = sum(one.nbytes for one in (region, following) if one and one.index in moved)
        peak = max(peak, staying + reloaded + region.backward_base)
        staying -= 0 if region.index in moved else region.nbytes
    return base_bytes + peak


def _within_budget(
    regions: Sequence[Region], movable: Sequence[Region], room: int, buffers: int, fixed: frozenset[int]
) -> tuple[Sequence[Region], str]:
    """The regions to move so that the saved inputs fit ``room`` bytes, and why."""

    def peak(moved: Sequence[Region]) -> int:
        return worst_peak(regions, fixed.union(region.index for region in moved), buffers=buffers)

    unmoved, lowest = peak(()), peak(movable)
    if unmoved <= room:
        return (), f"nothing to move: the peak is {_gib(room - unmoved)} below the budget"
    if lowest == unmoved:
        return (), f"cannot fit: {_gib(unmoved - room)} over the budget, and moving inputs would not lower the peak"
    # Moving one more region never raises the worst peak, so the lowest is that of moving all.
    moved, how = _fewest_bytes(movable, peak, max(room, lowest))
    if lowest > room:
        return moved, f"cannot fit: {_gib(lowest - room)} over the budget at the lowest peak that moving inputs reaches"
    return moved, f"the fewest bytes that fit the budget ({how})"


def _fewest_bytes(
    movable: Sequence[Region], peak: Callable[[Sequence[Region]], int], room: int
) -> tuple[Sequence[Region], str]:
    """A choice whose peak is at most ``room``, which that of all ``movable`` is, and how sure it is to be the least."""
    if len({region.nbytes for region in movable}) == 1:
        # Of as many regions of one size, the earliest have been copied by the most later times.
        return next(movable[:count] for count in range(len(movable) + 1) if peak(movable[:count]) <= room), "exact"
    if len(movable) <= EXACT_REGIONS:
        choices = (some for count in range(len(movable) + 1) for some in combinations(movable, count))
        fitting = (some for some in choices if peak(some) <= room)
        return min(fitting, key=lambda some: sum(region.nbytes for region in some)), "exact"
    moved = list(movable)
    for region in sorted(movable, key=lambda region: region.nbytes, reverse=True):
        rest = [other for other in moved if other is not region]
        if peak(rest) <= room:
            moved = rest
    return moved, "no region of it can be left out"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
