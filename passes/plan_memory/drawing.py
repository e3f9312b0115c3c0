"""What a plan holds on the device over the step, and what it does in each segment, to be drawn. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from glue_compiler.passes.plan_memory.choose import Choice
from glue_compiler.passes.plan_memory.plan import Plan
from glue_compiler.passes.plan_memory.predict import Lives, Predictor
from glue_compiler.passes.plan_memory.step import Step

POINTS = 300
"""So many places of a graph are drawn at most: each stands for the most at any of those around it."""
KINDS = ("kept", "moved", "recomputed", "other")


def drawing_of(plan: Plan, step: Step, predictor: Predictor, budget: int) -> dict[str, Any]:
    """Plain data: ``budget`` and ``always``, the bytes of inputs; ``forward`` and ``backward``, for each place the
    bytes of each of ``kinds``; ``segments``, of each its ``number``, ``kept`` and ``moved`` bytes and ``recomputed``
    kernels.
    """
    ahead, back, before, behind = predictor.lives(Choice(plan.saved, plan.recomputed), plan.moved)
    return {
        "budget": budget,
        "always": step.input_bytes,
        "kinds": list(KINDS),
        "forward": _places(plan, step, ahead, before, is_backward=False),
        "backward": _places(plan, step, back, behind, is_backward=True),
        "segments": _segments(plan, step),
    }


def _places(plan: Plan, step: Step, lives: Lives, order: Sequence[int], *, is_backward: bool) -> list[list[int]]:
    changes = {kind: [0] * (len(order) + 1) for kind in KINDS}
    for place, (at, over, nbytes) in lives.items():
        kind = "moved" if place in plan.moved else "kept" if place in plan.saved else "other"
        if is_backward and place in plan.recomputed and kind == "other":
            kind = "recomputed"
        changes[kind][at] += nbytes
        changes[kind][over + 1] -= nbytes
    for at, place in enumerate(order):
        changes["other"][at] += step.values[place].scratch
        changes["other"][at + 1] -= step.values[place].scratch
    alive = zip(*(list(accumulate(changes[kind]))[:-1] for kind in KINDS), strict=True)
    return _fewer([list(one) for one in alive])


def _fewer(places: Sequence[list[int]]) -> list[list[int]]:
    step = max(1, -(-len(places) // POINTS))
    return [max(places[start : start + step], key=sum) for start in range(0, len(places), step)]


def _segments(plan: Plan, step: Step) -> list[Mapping[str, int]]:
    found = {number: {"number": number, "kept": 0, "moved": 0, "recomputed": 0} for number in plan.segments.values()}
    for place in plan.saved:
        kind = "moved" if place in plan.moved else "kept"
        found[plan.segments[place]][kind] += step.values[place].nbytes
    for place in plan.recomputed:
        if place in plan.segments:
            found[plan.segments[place]]["recomputed"] += step.values[place].is_kernel
    return [found[number] for number in sorted(found)]
