"""One recorded step of several GPUs as a picture: compute and each kind of collective, a lane each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.profiler_trace import Interval, hidden, joined
from benchmarks.timeline_svg import Panel, Span

COLLECTIVES = {"AllGather": "all-gather", "ReduceScatter": "reduce-scatter", "AllReduce": "all-reduce"}
"""Part of the name of NCCL's kernel → what the lane is called."""
COMPUTE = "compute"
LEAST = 0.002
"""Of a step: what a lane has to work, to be drawn."""
GAP = 20e-6
"""Seconds; kernels not further apart are one bar."""


@contextlib.contextmanager
def recorded(file: Path) -> Iterator[None]:
    """What runs in here is written as a Chrome trace."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield
    profiler.export_chrome_trace(str(file))


def lanes_of(trace_events: Iterable[Mapping[str, Any]]) -> dict[str, list[Interval]]:
    """Seconds at which each lane works, from the first work on the device on.

    Raises:
        ValueError: there was no work on a device.
    """
    found: dict[str, list[Interval]] = {COMPUTE: []}
    for event in trace_events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name = next((lane for part, lane in COLLECTIVES.items() if f"_{part}_" in event["name"]), COMPUTE)
        found.setdefault(name, []).append((event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6))
    if not any(found.values()):
        raise ValueError("the trace has no work on a device")
    begin = min(start for each in found.values() for start, _ in each)
    return {name: [(start - begin, end - begin) for start, end in sorted(each)] for name, each in found.items()}


def panel(title: str, file: Path) -> Panel:
    """Of a trace that ``recorded`` wrote; the title says how long each lane works, and what of it is hidden."""
    lanes = lanes_of(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])
    step = max(end for each in lanes.values() for _, end in each)
    words, drawn = [f"{step * 1e3:.1f} ms"], []
    for place, (name, intervals) in enumerate(lanes.items()):
        bars = joined(intervals, GAP if name == COMPUTE else 0.0)
        busy = sum(end - start for start, end in joined(intervals, 0.0))
        if busy < LEAST * step:
            continue
        word = f"{name} {busy * 1e3:.1f}"
        words.append(
            word if name == COMPUTE else f"{word}, {hidden(intervals, lanes[COMPUTE]):.0%} of it beside compute"
        )
        colour = None if name == COMPUTE else place
        drawn.append((name, tuple(Span(start * 1e3, end * 1e3, colour, "") for start, end in bars)))
    return Panel(f"{title}: {'; '.join(words)}", tuple(drawn))
