"""Which kernels a training step runs, and how long each takes: what benchmarks.end_to_end prints with ``--kernels``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.profiler_trace import joined


@dataclass(frozen=True)
class Kernel:
    """All runs of one kernel: how many there are in a step, and their milliseconds together."""

    name: str
    calls: float
    ms: float


@dataclass(frozen=True)
class StepKernels:
    """``kernels`` of a step, longest first; ``busy_ms``, in which at least one runs, and ``step_ms`` on the device."""

    kernels: tuple[Kernel, ...]
    busy_ms: float
    step_ms: float


def profiled(run: Callable[[], Any], steps: int) -> StepKernels:
    """What ``run``, which makes so many steps, has the GPU do."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return step_kernels([(event.name, event.time_range.start, event.time_range.end) for event in events], steps)


def step_kernels(spans: Iterable[tuple[str, float, float]], steps: int) -> StepKernels:
    """Of (name, start, end) in microseconds, of ``steps`` steps.

    Raises:
        ValueError: there are none.
    """
    found: dict[str, list[float]] = {}
    intervals = []
    for name, start, end in spans:
        found.setdefault(_short(name), []).append(end - start)
        intervals.append((start, end))
    if not intervals:
        raise ValueError("nothing ran on the device")
    running = joined(intervals, 0.0)
    busy, whole = sum(end - start for start, end in running), running[-1][1] - running[0][0]
    kernels = [Kernel(name, len(each) / steps, sum(each) / steps / 1e3) for name, each in found.items()]
    kernels.sort(key=lambda kernel: -kernel.ms)
    return StepKernels(tuple(kernels), busy / steps / 1e3, whole / steps / 1e3)


def lines_of(step: StepKernels, number: int) -> Iterator[str]:
    """A table of the ``number`` longest, and what the others take together."""
    yield f"busy {step.busy_ms:.2f} ms of {step.step_ms:.2f}, {sum(each.calls for each in step.kernels):.0f} kernels"
    yield "| ms | calls | kernel |\n|---|---|---|"
    for each in step.kernels[:number]:
        yield f"| {each.ms:.3f} | {each.calls:.4g} | `{each.name}` |"
    others = step.kernels[number:]
    if others:
        yield f"| {sum(each.ms for each in others):.3f} | {sum(each.calls for each in others):.4g} | others |"


def _short(name: str) -> str:
    """A C++ kernel without its arguments, at most 90 characters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.sub(r"\s+", " ", name.partition("(")[0] or name)[:90]
