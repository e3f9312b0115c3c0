"""What a step of checkpoint offload would do in time: three engines, each in order, on plain data.

The compute engine and the two copy engines (full duplex) work like CUDA streams: work runs in the order in which it is
issued, a copy starts no earlier than the point of the compute stream where it was issued, and the compute engine waits
where the program says so. Every engine is first in, first out, so that going through the program once in issue order
gives the same times as a queue of events would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

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
    """

    index: int
    nbytes: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

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


class Run:
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


def simulate(regions: Sequence[Region], link: Link, moved: Collection[int], buffers: int = 2) -> tuple[Event, ...]:
    """Run one step, with its copies beside compute: the forward of all regions, then their backward in reverse.

    In forward, a copy starts after its region, and the compute engine waits for it after the next region, behind the
    start of that one's copy (in front of it, if ``buffers`` is 1). In backward, the reload of a region starts with the
    backward of the region before it (the next one in the model) if one of ``buffers`` is free, and the compute engine
    waits just before the region's own backward.

    Args:
        regions: in the order of the forward.
        moved: indices of the regions whose saved input goes to the host.
        buffers: the most copies in flight in forward, and the most reloaded inputs alive in backward.
    """
    run = Run(link)
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
    return tuple(run.events)
