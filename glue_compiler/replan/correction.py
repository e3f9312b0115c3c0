"""What a plan assumes about a step before any step was seen."""

from __future__ import annotations

from glue_compiler.options import Correction

GUESSED_CALLS = 128
"""More than a decoder has layers."""
STEPS = 128
"""In so many steps a budget is divided for what else is on the device."""


def guess(budget: int, allocated: int, inputs: int, parameters: int, *, is_auto: bool) -> Correction:
    """What to plan with before a step is seen, for a graph that other graphs of its step run in front of.

    It is a whole model if its parameters are more than half of what is allocated, else a layer that is compiled alone.

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
