"""Cuts a forward into segments at its narrow places, where little lies in memory that is read later.

Recomputation starts from what is kept at a segment's border and stays inside: values that live across a border are not
recomputed, so backward holds the intermediate values of one segment at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from glue_compiler.passes.plan_memory.step import TrainingStep

SLACK = 1.05
"""A place is narrow if it is at most so many times as wide as the narrowest."""
LENGTHS = (1, 2, 4)
"""Segments are tried that reach from each narrow place to the next, to the one after it, and so on."""
FEW = 4
"""With at most so many narrow places, as one layer has, the whole and each way to cut it in two are tried as well."""

Segments = Mapping[int, int]
"""By place, the number of the segment that computes a value of the forward, in order."""


def segmentations(step: TrainingStep) -> Iterator[Segments]:
    """Ways to cut the forward into segments, the user's checkpointed regions first where there are some."""
    if len(set(step.regions.values())) > 1:
        yield _by_regions(step)
    borders = _narrow_places(step)
    for length in LENGTHS:
        chosen = borders[::length]
        if len(chosen) > 1 or length == 1:
            yield _between(step, chosen)
    if 0 < len(borders) <= FEW:
        yield _between(step, [])
        if len(borders) > 1:
            yield from (_between(step, [border]) for border in borders)


def _between(step: TrainingStep, borders: list[int]) -> Segments:
    begins = set(borders)
    numbers = accumulate(place in begins for place in step.forward)
    found = dict(zip(step.forward, numbers, strict=True))
    for place in step.forward:
        if step.is_element(place):  # with what it is an element of, which has no value of its own to be kept
            found[place] = min(found[read] for read in step.values[place].inputs)
    return found


def _by_regions(step: TrainingStep) -> Segments:
    """Segments begin where a region's first value is computed; what lies behind a region belongs to it."""
    begins: dict[int, int] = {}
    for place in step.forward:
        if place in step.regions:
            begins.setdefault(step.regions[place], place)
    return _between(step, sorted(begins.values()))


def _narrow_places(step: TrainingStep) -> list[int]:
    """Places in front of which little is alive, one between any two kernels."""
    order = {place: index for index, place in enumerate(step.forward)}
    last_read: dict[int, int] = {}
    for place in step.forward:
        for read in step.values[place].inputs:
            last_read[step.values[read].root] = order[place]
    changes = [0] * (len(order) + 1)
    for place, index in order.items():
        value = step.values[place]
        if value.nbytes and place in last_read:
            changes[index + 1] += value.nbytes
            changes[min(last_read[place] + 1, len(order))] -= value.nbytes
    alive = list(accumulate(changes))  # at index i: what was computed before it and is read from it on
    kernels = step.kernels_before(step.forward)  # in front of index i
    # The embedding and the loss are narrower than any layer: the middle of the forward counts.
    # In front of an element only what it is an element of lies in memory, which counts with its elements.
    computed = [index for place, index in order.items() if not (step.values[place].is_input or step.is_element(place))]
    quarter = len(computed) // 4
    middle = [alive[index] for index in computed[quarter : len(computed) - quarter]]
    if not middle:
        return []
    width = SLACK * min(middle)
    found: list[int] = []
    seen = -1
    for place, index in order.items():
        if 0 < alive[index] <= width and kernels[index] != seen and not step.is_element(place):
            seen = kernels[index]
            found.append(place)
    return found
