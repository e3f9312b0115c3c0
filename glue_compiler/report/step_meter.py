"""What the first steps of a planned graph take, beside what was predicted: the peak on its device, and the time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from glue_compiler.observer import Call, Observer
from glue_compiler.report.graph_report import GraphReport
from glue_compiler.report.session import Session

FIRST, CALLS = 1, 2
"""Calls are measured from this one on, and so many of them: the first compiles."""


@dataclass(frozen=True)
class Mark:
    """A moment of a device's stream: bytes of all tensors, the most that they have been, and the time."""

    allocated: int
    peak: int
    event: Any

    @classmethod
    def now(cls, device: torch.device) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return cls(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device), event)


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one graph: its forward and its backward, without what lies between.

    Attributes:
        peak: bytes on the device that are there because of the graph, its inputs among them. What else was there when
            it was called is left out.
        is_exact: the peak is this step's. Else one before it was higher, and this one's is at most so high.
        microseconds: of the forward and the backward.
    """

    peak: int
    is_exact: bool
    microseconds: int


class StepMeter(Observer):
    """Adds to the report of a graph with a plan what its second and third step took. Leaves torch's statistics alone.

    Args:
        mark: where the device is now. kinds: of the devices whose steps are measured.
    """

    name = "meter"

    def __init__(
        self,
        report: GraphReport,
        session: Session,
        mark: Callable[[torch.device], Mark] = Mark.now,
        kinds: Collection[str] = ("cuda",),
    ) -> None:
        self.report, self.session, self.mark, self.kinds = report, session, mark, kinds
        self._lock = threading.Lock()
        self._calls = 0

    def compiled(self, call: Call) -> Call:
        return _Metered(call, self) if any(p.drawing for p in self.report.passes) else call

    def takes_part(self) -> bool:
        """Is this call one to be measured?"""
        with self._lock:
            self._calls += 1
            return FIRST < self._calls <= FIRST + CALLS

    def add(self, marks: list[Mark], inputs: int) -> None:
        """``marks``: where forward began and ended, and where backward did. ``inputs``: their bytes."""
        before, _, _, after = marks
        peak = max(mark.peak for mark in marks)
        seconds = sum(start.event.elapsed_time(end.event) for start, end in (marks[:2], marks[2:])) / 1e3
        found = MeasuredStep(peak - before.allocated + inputs, after.peak > before.peak, round(seconds * 1e6))
        with self._lock:
            self.report.measured.append(dataclasses.asdict(found))
        self.session.show(self.report, [])


class _Metered:
    """A compiled graph whose calls leave marks on the stream; they are read when the next call comes."""

    def __init__(self, call: Call, meter: StepMeter) -> None:
        self.call, self.meter = call, meter
        self._waiting: list[tuple[list[Mark], int]] = []

    def __call__(self, *args: Any) -> Any:
        self._read()
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        device = next((tensor.device for tensor in tensors if tensor.device.type in self.meter.kinds), None)
        if device is None or not torch.is_grad_enabled() or not self.meter.takes_part():
            return self.call(*args)
        marks = [self.meter.mark(device)]
        inputs = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        results = self.call(*args)
        marks.append(self.meter.mark(device))
        node = next((r.grad_fn for r in tree_leaves(results) if isinstance(r, torch.Tensor) and r.grad_fn), None)
        if node is not None:
            node.register_prehook(lambda _: marks.append(self.meter.mark(device)))
            node.register_hook(lambda *_: self._finish(marks, device, sum(inputs.values())))
        return results

    def _finish(self, marks: list[Mark], device: torch.device, inputs: int) -> None:
        marks.append(self.meter.mark(device))
        if len(marks) == 4:  # one backward of this forward, and not a second one
            self._waiting.append((marks, inputs))

    def _read(self) -> None:
        ready = [one for one in self._waiting if one[0][-1].event.query()]
        for one in ready:
            self._waiting.remove(one)
            self.meter.add(*one)
