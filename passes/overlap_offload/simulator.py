"""What a step of checkpoint offload would do in time and memory: three engines, each in order, on plain data.

The compute engine and the two copy engines (full duplex) work like CUDA streams: work runs in the order in which it is
issued, a copy starts no earlier than the point of the compute stream where it was issued, and the compute engine waits
where the program says so. Every engine is first in, first out, so that going through the program once in issue order
gives the same times as a queue of events would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

Schedule = Literal["none", "serial", "overlapped"]
Engine = Literal["compute", "device_to_host", "host_to_device"]
EventKind = Literal["forward", "backward", "offload", "reload", "wait"]


@dataclass(frozen=True)
class Region:
    """A checkpointed block.

    Attributes:
        index: its name in plans and events; unique in a step.
        nbytes: bytes of its saved input.
        forward_seconds: compute time of its forward.
        backward_seconds: compute time of its backward, with the recomputation.
        forward_base: the most bytes of everything but saved inputs during its forward, for ``worst_peak`` alone.
        backward_base: likewise during its backward.
    """

    index: int
    nbytes: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_base: int = 0
    backward_base: int = 0

    def __post_init__(self) -> None:
        if self.nbytes < 0 or not (self.forward_seconds >= 0 and self.backward_seconds >= 0):
            raise ValueError(f"a region's bytes and seconds are not negative: {self}")


@dataclass(frozen=True)
class Link:
    """Between device and host: bytes a second in each direction, and the seconds that each copy takes besides."""

    host_to_device: float
    device_to_host: float
    latency: float

    def __post_init__(self) -> None:
        if not (self.host_to_device > 0 and self.device_to_host > 0 and self.latency >= 0):
            raise ValueError(f"a link's bandwidths are positive, its latency is not negative: {self}")


@dataclass(frozen=True)
class Event:
    """One piece of work of one engine, or a ``wait`` of the compute engine for a copy; seconds since the step began."""

    engine: Engine
    region: int
    kind: EventKind
    start: float
    end: float


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
        schedule: "serial": the compute engine waits for every copy at once. "overlapped": in forward, a copy starts
            after its region, and the compute engine waits for it after the next region, behind the start of that one's
            copy (in front of it, if ``buffers`` is 1); in backward, the reload of a region starts with the backward of
            the region before it (the next one in the model) if one of ``buffers`` is free, and the compute engine
            waits just before the region's own backward.
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
    run = _Run(link)
    if schedule == "overlapped":
        _run_overlapped(run, regions, moved, buffers)
    else:
        _run_serial(run, regions, moved)
    events = tuple(run.events)
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


class _Run:
    """The engines' clocks and what they did; each method issues one piece of work."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.compute = self.device_to_host = self.host_to_device = 0.0
        self.events: list[Event] = []
        self.offloaded: dict[int, float] = {}

    def forward(self, region: Region) -> None:
        self._compute(region, "forward", region.forward_seconds)

    def backward(self, region: Region) -> None:
        self._compute(region, "backward", region.backward_seconds)

    def _compute(self, region: Region, kind: EventKind, seconds: float) -> None:
        start, self.compute = self.compute, self.compute + seconds
        self.events.append(Event("compute", region.index, kind, start, self.compute))

    def offload(self, region: Region) -> Event:
        start = max(self.compute, self.device_to_host)
        self.device_to_host = start + self.link.latency + region.nbytes / self.link.device_to_host
        self.offloaded[region.index] = self.device_to_host
        self.events.append(Event("device_to_host", region.index, "offload", start, self.device_to_host))
        return self.events[-1]

    def reload(self, region: Region) -> Event:
        start = max(self.compute, self.host_to_device, self.offloaded[region.index])
        self.host_to_device = start + self.link.latency + region.nbytes / self.link.host_to_device
        self.events.append(Event("host_to_device", region.index, "reload", start, self.host_to_device))
        return self.events[-1]

    def wait(self, copy: Event) -> None:
        """The compute engine does nothing until ``copy`` has ended."""
        if copy.end > self.compute:
            self.events.append(Event("compute", copy.region, "wait", self.compute, copy.end))
            self.compute = copy.end


def _run_serial(run: _Run, regions: Sequence[Region], moved: frozenset[int]) -> None:
    for region in regions:
        run.forward(region)
        if region.index in moved:
            run.wait(run.offload(region))
    for region in reversed(regions):
        if region.index in moved:
            run.wait(run.reload(region))
        run.backward(region)


def _run_overlapped(run: _Run, regions: Sequence[Region], moved: frozenset[int], buffers: int) -> None:
    in_flight: deque[Event] = deque()
    for region in regions:
        run.forward(region)
        started = []
        if region.index in moved:
            while len(in_flight) >= buffers:
                run.wait(in_flight.popleft())
            started.append(run.offload(region))
        while in_flight:
            run.wait(in_flight.popleft())
        in_flight.extend(started)
    reloads: dict[int, Event] = {}
    backward = regions[::-1]
    for region, following in zip_longest(backward, backward[1:]):
        if region.index in moved:
            if region.index not in reloads:
                reloads[region.index] = run.reload(region)
            run.wait(reloads[region.index])
        alive = 1 if region.index in moved else 0
        if following and following.index in moved and alive < buffers:
            reloads[following.index] = run.reload(following)
        run.backward(region)


def _overlap(events: Iterable[Event]) -> float:
    events = tuple(events)
    work = [event for event in events if event.kind in ("forward", "backward")]
    copies = [event for event in events if event.kind in ("offload", "reload")]
    total = sum(copy.end - copy.start for copy in copies)
    if not total:
        return 1.0
    hidden = sum(max(0.0, min(copy.end, one.end) - max(copy.start, one.start)) for copy in copies for one in work)
    return min(1.0, hidden / total)
