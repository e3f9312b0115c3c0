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
        is_least: take the least memory, whatever the budget.
        told: where that is from, for the report; empty where nothing was measured.
    """

    calls: int = 1
    taken: int = 0
    is_least: bool = False
    told: str = ""

    @property
    def is_measured(self) -> bool:
        return bool(self.told)


NONE = Correction()


def guess(budget: int, allocated: int, inputs: int, parameters: int, *, is_auto: bool) -> Correction:
    """For the first steps of a graph in the middle of a step: a layer that is compiled by itself, or a whole model.

    Of graphs that have more than half of the device's bytes as parameters of their own there is no second one.

    Args:
        allocated: bytes on the device when the graph is compiled; inputs: of these, its inputs' on that device, among
            them its ``parameters``.
        is_auto: the budget leaves out what is there already.
    """
    if not parameters <= allocated < 2 * parameters:  # fewer are there if an allocator does not count
        return Correction(GUESSED_CALLS)
    # In steps, so that a cache is hit although some bytes more are there.
    step = max(1, budget // STEPS)
    return Correction(taken=0 if is_auto else -(-max(0, allocated - inputs) // step) * step)
