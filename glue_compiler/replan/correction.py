"""What is known about a step beside its graph, for a plan."""

from __future__ import annotations

from dataclasses import dataclass

GUESSED_CALLS = 128
"""More than a decoder has layers."""
STEPS = 128
"""In so many steps a budget is divided for what else is on the device."""


@dataclass(frozen=True)
class Correction:
    """What a plan is made with.

    Attributes:
        calls: so many calls of planned graphs wait for their backward at a time, and hold what the plan keeps.
        taken: bytes that are taken off the budget.
        handed: bytes that each of the calls holds beside what its plan keeps, as far as ``taken`` does not count them.
        is_least: take the least memory, whatever the budget.
        told: where that is from, for the report; empty where nothing was measured.
    """

    calls: int = 1
    taken: int = 0
    handed: int = 0
    is_least: bool = False
    told: str = ""

    @property
    def is_measured(self) -> bool:
        return bool(self.told)


NONE = Correction()


def guess(budget: int, allocated: int, inputs: int, parameters: int, handed: int, *, is_auto: bool) -> Correction:
    """For the first steps of a graph in the middle of a step, such as a layer that is compiled by itself.

    No more calls wait than there is room for by their weights, as far as each has its own.

    Args:
        allocated: bytes on the device when the graph is compiled; inputs: of these, its inputs' on that device, among
            them its ``parameters``, and what calls before it have ``handed`` it, which it keeps for backward.
        is_auto: the budget leaves out what is there already.
    """
    is_counted = 0 < parameters <= allocated  # some allocators do not count
    calls = min(GUESSED_CALLS, allocated // parameters) if is_counted else GUESSED_CALLS
    # In steps, so that a cache is hit although some bytes more are there.
    step = max(1, budget // STEPS)
    taken = 0 if is_auto else -(-max(0, allocated - inputs) // step) * step
    return Correction(calls, taken, handed)
