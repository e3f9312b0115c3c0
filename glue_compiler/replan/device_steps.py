"""Counts the calls of planned graphs that wait for their backward on a device, and marks what is allocated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from glue_compiler.replan.decision import StepFacts


class Held(NamedTuple):
    """Bytes that tensors hold on a device, the most that they ever did, and how often it ran out of memory."""

    allocated: int
    peak: int
    failures: int

    @classmethod
    def now(cls, device: torch.device) -> Held:
        found = torch.cuda.memory_stats(device)
        return cls(*(int(found.get(f"{key}", 0)) for key in _COUNTS))


_COUNTS = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "num_ooms")


@dataclass
class _Step:
    start: Held
    compiles: int
    inputs: dict[Hashable, int] = field(default_factory=dict)
    most: int = 0
    before: int = 0
    kept: int = 0
    finished: int = 0
    lost: int = 0
    end: Held | None = None


@dataclass(frozen=True)
class DoneStep:
    """A step that is over.

    Attributes:
        facts: what the device showed. inputs: by graph, the bytes of its inputs in its last call.
        is_whole: every call had its backward, and nothing was compiled meanwhile.
        ran_out: a call had none, and the device ran out of memory.
    """

    facts: StepFacts
    inputs: dict[Hashable, int]
    is_whole: bool
    ran_out: bool


class DeviceSteps:
    """The steps of one device, from a call that finds none waiting to the backward that leaves none.

    Not safe by itself: its owner has a lock.
    """

    def __init__(self, mark: Callable[[], Held]) -> None:
        self._mark = mark
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[bool, int]] = {}
        # Of those that wait. A sum over them could be disturbed by one that is collected.
        self.holding, self._kept = 0, 0
        self._step: _Step | None = None

    @property
    def is_quiet(self) -> bool:
        return not self._waiting

    def end_after_failure(self, compiles: int) -> None:
        """Where the device ran out of memory, what waits is lost: a program may hold its results until the next call.

        What a compile tries out may run out of memory, too.
        """
        step = self._step
        if step and self._waiting and step.compiles == compiles and self._mark().failures > step.start.failures:
            for number in list(self._waiting):
                self.ended(number, has_run=False)

    def done(self, compiles: int) -> DoneStep | None:
        """The step that is over, once; ``compiles``: how many there have been by now."""
        step, self._step = self._step, None
        if step is None:
            return None
        ran_out = step.lost > 0 and self._mark().failures > step.start.failures
        if step.end is None and not ran_out:
            return None
        end = step.end or step.start
        facts = StepFacts(step.start.allocated, step.most, step.before, step.kept, end.peak, end.peak > step.start.peak)
        is_whole = step.end is not None and step.compiles == compiles
        return DoneStep(facts, step.inputs, is_whole and not ran_out, ran_out)

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
        if (self.holding + 1, now) > (step.most, step.before):
            step.most, step.before, step.kept = self.holding + 1, now, self._kept
        number = next(self._numbers)
        self._waiting[number] = holds, kept
        self.holding += holds
        self._kept += holds * kept
        return number

    def ended(self, number: int, *, has_run: bool) -> None:
        """A call waits no more: its backward ``has_run``, or there will be none."""
        found = self._waiting.pop(number, None)
        if found is None:
            return
        holds, kept = found
        self.holding -= holds
        self._kept -= holds * kept
        if self._step is None:
            return
        if has_run:
            self._step.finished += 1
        else:
            self._step.lost += 1
        if not self._waiting and self._step.finished:
            self._step.end = self._mark()
