"""Times, memory, host syncs and errors of one step, on a GPU or (for a smoke test) on the CPU."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], object]


def milliseconds(step: Step, repeats: int) -> float:
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - begin) / repeats * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def milliseconds_in_turn(steps: dict[str, Step], rounds: int = 7) -> dict[str, float]:
    """Medians; the order turns by one in every round. A slow step is repeated less often within a round."""
    repeats, times = {}, {name: [] for name in steps}
    for name, step in steps.items():
        step()
        repeats[name] = max(1, min(4, int(60 / milliseconds(step, 1))))
    for turn in range(rounds):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            steps[name]()
            times[name].append(milliseconds(steps[name], repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def seconds(step: Step) -> float:
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def peak_gib(step: Step, parameters: Iterable[Tensor]) -> float | None:
    """GiB that ``step`` needs at most, its parameters included and what else the process holds left out."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    own = sum(parameter.nbytes for parameter in parameters)
    return (torch.cuda.max_memory_allocated() - before + own) / 2**30


WAITS = {
    "cudaStreamSynchronize": "stream sync",
    "cudaEventSynchronize": "event sync",
    "Memcpy DtoH": "copy to host",
    "aten::_local_scalar_dense": "item",
    "aten::nonzero": "nonzero",
}
"""What the profiler calls a wait of the host, or an operator that makes one."""


def host_waits(step: Step) -> dict[str, int]:
    """How often one ``step`` does each of ``WAITS``; what it never does is left out."""
    return dict(Counter(WAITS[found] for name, _ in _events(step) for found in WAITS if name.startswith(found)))


def kernels(step: Step, number: int) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds) of the ``number`` kernels that take the most time in one ``step``."""
    times: dict[str, list[float]] = {}
    for name, device_ms in _events(step):
        if device_ms is not None:
            times.setdefault(name, []).append(device_ms)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [(name, len(each), sum(each)) for name, each in ranked[:number]]


def _events(step: Step) -> list[tuple[str, float | None]]:
    """(name, milliseconds on the device or None) of all that one ``step`` does."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    return [
        (event.name, event.time_range.elapsed_us() / 1e3 if event.device_type == DeviceType.CUDA else None)
        for event in profiler.events()
    ]


def results(layer: nn.Module, x: Tensor, output: Tensor) -> dict[str, Tensor]:
    """The output and every gradient that backward left, by name."""
    named = {"output": output.detach()}
    if x.grad is not None:
        named["grad of input"] = x.grad
    named |= {f"grad of {n}": p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return named


def largest_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """(error, name) of the tensor with the largest difference, as a part of the largest value wanted."""
    if missing := want.keys() ^ got.keys():
        return float("inf"), f"no {sorted(missing)[0]}"
    errors = {}
    for name, wanted in want.items():
        scale = wanted.abs().max().item()
        difference = (got[name].float() - wanted.float()).abs().max().item()
        errors[name] = difference / scale if scale else difference
    # A NaN is the largest of all.
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return errors[worst], worst
