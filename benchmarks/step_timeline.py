"""A simulated step of checkpoint offload beside others, in time and memory: without copies, and with serial ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks import offload_simulator
from benchmarks.offload_simulator import Event, Link, Region

Schedule = Literal["none", "serial", "overlapped"]


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        events: in issue order; a wait that takes no time is left out.
        step_seconds: when the last event ends.
        peak_bytes: the most bytes at one time, ``base_bytes`` and the saved inputs on the device together.
        overlap: the share, 0 to 1, of copying time during which the compute engine worked; 1 without copies.
    """

    events: tuple[Event, ...]
    step_seconds: float
    peak_bytes: int
    overlap: float


def simulate(
    regions: Sequence[Region],
    link: Link,
    moved: Collection[int],
    schedule: Schedule,
    *,
    buffers: int = 2,
    base_bytes: int = 0,
) -> Timeline:
    """Run one step: the forward of all regions, then their backward in reverse.

    Args:
        regions: in the order of the forward.
        moved: indices of the regions whose saved input goes to the host; must be empty for the schedule "none".
        schedule: "serial": the compute engine waits for every copy at once. "overlapped": as the pass schedules them.
        buffers: the most copies in flight in forward, and the most reloaded inputs alive in backward.
        base_bytes: everything else on the device.

    Raises:
        ValueError: an unknown or repeated index, ``buffers`` below 1, or a moved region under "none".
    """
    indices = {region.index for region in regions}
    if len(indices) < len(regions) or not indices.issuperset(moved):
        raise ValueError(f"regions need indices of their own, and moved ones must be among them: {sorted(moved)}")
    if buffers < 1:
        raise ValueError(f"a schedule needs at least one buffer, not {buffers}")
    if schedule == "none" and moved:
        raise ValueError('the schedule "none" moves nothing')
    moved = frozenset(moved)
    if schedule == "overlapped":
        events = offload_simulator.simulate(regions, link, moved, buffers)
    else:
        events = _serial(regions, link, moved)
    return Timeline(
        events=events,
        step_seconds=max((event.end for event in events), default=0.0),
        peak_bytes=max(held for _, held in memory_over_time(events, regions, moved, base_bytes)),
        overlap=_overlap(events),
    )


def memory_over_time(
    events: Iterable[Event], regions: Sequence[Region], moved: Collection[int], base_bytes: int = 0
) -> tuple[tuple[float, int], ...]:
    """``(second, bytes on the device from then on)`` for every change, with ``events`` of one simulated step.

    A saved input is there from the end of the forward before it to the end of its own backward; a moved one is not
    between the end of its copy and the start of its reload. Changes of one second are in the order of their causes.
    """
    events = tuple(events)
    # What comes and goes with an event is ordered by the event's place, so that work of no time counts too.
    place = {(event.kind, event.region): (number, event) for number, event in enumerate(events)}
    changes: list[tuple[float, int, int]] = []
    produced = (0.0, -1)
    for region in regions:
        number, backward = place["backward", region.index]
        changes += [(*produced, region.nbytes), (backward.end, number, -region.nbytes)]
        if region.index in moved:
            number, offload = place["offload", region.index]
            changes.append((offload.end, number, -region.nbytes))
            number, reload = place["reload", region.index]
            changes.append((reload.start, number, region.nbytes))
        number, forward = place["forward", region.index]
        produced = (forward.end, number)
    held, steps = base_bytes, [(0.0, base_bytes)]
    for second, _, change in sorted(changes):
        held += change
        steps.append((second, held))
    return tuple(steps)


def _serial(regions: Sequence[Region], link: Link, moved: Collection[int]) -> tuple[Event, ...]:
    run = offload_simulator.Run(link)
    for region in regions:
        run.forward(region)
        if region.index in moved:
            run.wait(run.offload(region))
    for region in reversed(regions):
        if region.index in moved:
            run.wait(run.reload(region))
        run.backward(region)
    return tuple(run.events)


def _overlap(events: Iterable[Event]) -> float:
    events = tuple(events)
    work = [event for event in events if event.kind in ("forward", "backward")]
    copies = [event for event in events if event.kind in ("offload", "reload")]
    total = sum(copy.end - copy.start for copy in copies)
    if not total:
        return 1.0
    hidden = sum(max(0.0, min(copy.end, one.end) - max(copy.start, one.start)) for copy in copies for one in work)
    return min(1.0, hidden / total)
