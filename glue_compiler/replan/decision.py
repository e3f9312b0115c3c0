"""Is a plan to be made again, and for what? From plain data; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from glue_compiler.byte_sizes import with_unit
from glue_compiler.options import Correction

TOLERANCE = 0.03
"""The share of the budget by which a step may miss it."""


@dataclass(frozen=True)
class Predicted:
    """What a plan predicts, in bytes: the ``peak`` of one call, and what is ``kept`` between its forward and backward.

    ``is_fastest``, ``is_smallest``: no plan that was looked at is faster, or has a lower peak.
    """

    peak: int
    kept: int
    is_fastest: bool
    is_smallest: bool


@dataclass(frozen=True)
class StepFacts:
    """What a device showed from the first forward of a step to the last backward; bytes.

    Attributes:
        base: allocated when the first call began.
        calls: of planned graphs, the most that waited for their backward at a time and held what their plans keep.
        before: allocated when the last of those began; kept: what the plans of the others say they keep.
        peak: the most that was ever allocated. is_exact: it was so in this step; else this step's is at most that.
    """

    base: int
    calls: int
    before: int
    kept: int
    peak: int
    is_exact: bool


@dataclass(frozen=True)
class Asked:
    """What a graph was planned for.

    Attributes:
        budget: bytes.
        inputs: bytes of the graph's inputs, its parameters among them.
        besides: for ``memory_budget="auto"``, what else was there when it was compiled, which that leaves out; else 0.
        guess: what it was planned with before any step was seen; None where it was the first call of its step.
        predicted: None where the compiled graph came from a cache, and no plan was made.
    """

    budget: int
    inputs: int
    is_auto: bool = False
    besides: int = 0
    guess: Correction | None = None
    predicted: Predicted | None = None


def error_of(facts: StepFacts, asked: Asked) -> int:
    """Bytes by which a step is seen to take more than is predicted. 0 if that is not known."""
    if asked.predicted is None or not facts.is_exact:
        return 0
    return max(0, facts.peak - _with_others(facts.before, asked, asked.predicted))


def correction_for(facts: StepFacts, asked: Asked, error: int) -> Correction | None:
    """What to plan again with, after a step; None: the plan stays.

    Args:
        error: the largest of :func:`error_of` in the graph's steps.
    """
    limit = asked.budget + asked.besides
    seen = _seen(facts, asked, error)
    is_missed = seen > (1 + TOLERANCE) * limit
    is_fastest = asked.predicted is not None and asked.predicted.is_fastest
    if not is_missed and (is_fastest or not _has_more_room(facts, asked, limit)):
        return None
    is_smallest = asked.predicted is not None and asked.predicted.is_smallest
    if is_missed and is_smallest and facts.calls == 1:
        return None
    if asked.predicted is None:
        error = max(0, facts.peak - limit) if facts.is_exact else 0
    taken = _taken(facts, asked)
    several = f"; {facts.calls} calls of planned graphs waited for their backward at a time" if facts.calls > 1 else ""
    told = (
        f"a step was seen to take {with_unit(seen)} of {with_unit(limit)}, {with_unit(taken)} for what this graph does "
        f"not show{several}"
    )
    return Correction(facts.calls, taken + error, told=told)


def _taken(facts: StepFacts, asked: Asked) -> int:
    """What else was on the device, and is none of what the budget leaves out or plans keep."""
    taken = max(0, facts.before - facts.kept - asked.inputs)
    if asked.is_auto:  # asked again, it leaves out what is there then
        taken = max(0, taken - max(0, facts.base - asked.inputs))
    return taken


def _has_more_room(facts: StepFacts, asked: Asked, limit: int) -> bool:
    """Were there fewer calls than was guessed, or less beside them?"""
    if asked.guess is None:
        return False
    return facts.calls < asked.guess.calls or _taken(facts, asked) < asked.guess.taken - TOLERANCE * limit


def _seen(facts: StepFacts, asked: Asked, error: int) -> int:
    if facts.is_exact:
        return facts.peak
    return min(facts.peak, _with_others(facts.before, asked, asked.predicted) + error) if asked.predicted else 0


def _with_others(before: int, asked: Asked, predicted: Predicted) -> int:
    """The peak of all that is on the device: a call's inputs are there before it begins."""
    return max(0, before - asked.inputs) + predicted.peak
