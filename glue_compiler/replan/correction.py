"""What is known about a step beside its graph, for a plan."""

from __future__ import annotations

from dataclasses import dataclass

GUESSED_CALLS = 128
"""More than a decoder has layers."""


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
GUESS = Correction(calls=GUESSED_CALLS)
"""For the first steps of a graph in the middle of a step, such as a layer that is compiled by itself."""
