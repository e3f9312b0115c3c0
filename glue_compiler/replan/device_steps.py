"""Counts the calls of planned graphs that wait for their backward on a device, and marks what is allocated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from glue_compiler.replan.decision import StepFacts


class Held(NamedTuple):
    """Bytes that tensors hold on a device, and the most that they ever did."""

    allocated: int
    peak: int

    @classmethod
    def now(cls, device: torch.device) -> Held:
        return cls(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))


@dataclass
class _Step:
    start: Held
    compiles: int
    inputs: dict[Hashable, int] = field(default_factory=dict)
    most: int = 0
    before: int = 0
    kept: int = 0
    finished: int = 0
    end: Held | None = None


@dataclass(frozen=True)
class DoneStep:
    """A step that is over.

    Attributes:
        facts: what the device showed. inputs: by graph, the bytes of its inputs in its last call.
        is_whole: nothing was compiled meanwhile.
    """

    facts: StepFacts
    inputs: dict[Hashable, int]
    is_whole: bool


class DeviceSteps:
    """The steps of one device, from a call that finds none waiting to the backward that leaves none.

    Not safe by itself: its owner has a lock.
    """

    def __init__(self, mark: Callable[[], Held]) -> None:
        self._mark = mark
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[bool, int]] = {}
        # Sums over what waits, kept up to date: a call that is collected would change the dict during a loop over it.
        self._holding, self._kept = 0, 0
        self._step: _Step | None = None

    @property
    def is_quiet(self) -> bool:
        return not self._waiting

    def done(self, compiles: int) -> DoneStep | None:
        """The step that is over, once; ``compiles``: how many there have been by now."""
        step, self._step = self._step, None
        if step is None or step.end is None:
            return None
        start, peak = step.start, step.end.peak
        facts = StepFacts(start.allocated, step.most, step.before, step.kept, peak, peak > start.peak)
        return DoneStep(facts, step.inputs, step.compiles == compiles)

    def start(self, compiles: int) -> None:
        self._step = _Step(self._mark(), compiles)

    def called(self, graph: Hashable, inputs: int, kept: int, *, holds: bool = True) -> int | None:
        """A call begins; its number.

        Args:
            inputs: their bytes; kept: those that its plan keeps for backward.
            holds: they stay on the device. A checkpoint around the call drops them, and calls again in backward.
        """
        step = self._step
        if step is None:
            return None
        step.inputs[graph] = inputs
        now = self._mark().allocated
        if (self._holding + 1, now) > (step.most, step.before):
            step.most, step.before, step.kept = self._holding + 1, now, self._kept
        number = next(self._numbers)
        self._waiting[number] = holds, kept
        self._holding += holds
        self._kept += holds * kept
        return number

    def ended(self, number: int, *, has_run: bool) -> None:
        """A call waits no more: its backward ``has_run``, or there will be none."""
        found = self._waiting.pop(number, None)
        if found is None:
            return
        holds, kept = found
        self._holding -= holds
        self._kept -= holds * kept
        if self._step is not None:
            self._step.finished += has_run
            if not self._waiting and self._step.finished:
                self._step.end = self._mark()
