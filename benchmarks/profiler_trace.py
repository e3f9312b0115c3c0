"""What a torch.profiler trace says about copies and compute of one step, on plain trace events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Engine = Literal["compute", "device_to_host", "host_to_device"]
Interval = tuple[float, float]

COPIES: dict[str, Engine] = {"Memcpy DtoH": "device_to_host", "Memcpy HtoD": "host_to_device"}


@dataclass(frozen=True)
class MeasuredSpan:
    """Work of one engine, in seconds since the step's first; ``copy`` counts an engine's copies from 0."""

    engine: Engine
    start: float
    end: float
    copy: int | None = None


@dataclass(frozen=True)
class MeasuredStep:
    """``step_seconds`` from the first work on the device to the last; ``overlap`` as in ``step_timeline.Timeline``."""

    spans: tuple[MeasuredSpan, ...]
    step_seconds: float
    overlap: float


def read_step(
    trace_events: Iterable[Mapping[str, Any]], *, smallest_copy: int = 2**20, joined_gap: float = 20e-6
) -> MeasuredStep:
    """Read one step out of the ``traceEvents`` of a Chrome trace that torch.profiler exported.

    Args:
        trace_events: of one step on one device: kernels and copies are told by ``cat``, times are microseconds.
        smallest_copy: bytes; smaller copies between device and host are no checkpoint inputs and are left out.
        joined_gap: seconds; kernels not further apart than this become one span.

    Raises:
        ValueError: the trace has no work on a device.
    """
    kernels: list[Interval] = []
    copies: dict[Engine, list[Interval]] = {engine: [] for engine in COPIES.values()}
    for event in trace_events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        interval = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        engine = next((engine for prefix, engine in COPIES.items() if event["name"].startswith(prefix)), None)
        if engine is None:
            kernels.append(interval)
        elif event.get("args", {}).get("bytes", 0) >= smallest_copy:
            copies[engine].append(interval)
    copied = [interval for intervals in copies.values() for interval in intervals]
    if not kernels and not copied:
        raise ValueError("the trace has no kernels and no copies on a device")
    begin, finish = min(start for start, _ in kernels + copied), max(end for _, end in kernels + copied)
    spans = [MeasuredSpan("compute", start - begin, end - begin) for start, end in joined(kernels, joined_gap)]
    for engine, intervals in copies.items():
        for number, (start, end) in enumerate(sorted(intervals)):
            spans.append(MeasuredSpan(engine, start - begin, end - begin, number))
    return MeasuredStep(tuple(spans), finish - begin, hidden(copied, kernels))


def hidden(intervals: Sequence[Interval], kernels: Iterable[Interval]) -> float:
    """The share, 0 to 1, of the intervals' time in which the device computes too; 1 where they take none."""
    busy, total = joined(kernels, 0.0), sum(end - start for start, end in intervals)
    both = sum(max(0.0, min(end, last) - max(start, first)) for start, end in intervals for first, last in busy)
    return both / total if total else 1.0


def joined(intervals: Iterable[Interval], gap: float) -> list[Interval]:
    """The intervals' union, where those at most ``gap`` apart become one."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined
