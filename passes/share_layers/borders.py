"""Where one layer ends and the next begins: places in a graph that few values cross."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from glue_compiler.passes.share_layers.steps import Steps, is_item

CROSSING = (1, 2, 3)
"""How many values may cross a border. Most layers hand one on, some two (a residual kept apart)."""

CALL = 8
"""What a call of a body costs, as a number of steps: operators are not fused across its border."""

Span = tuple[int, int]
"""Steps from the first number to before the second."""


def spans_between_borders(steps: Steps) -> list[Span]:
    """Cut the steps where few values cross, so that as many pieces as possible are alike. All steps are covered.

    A value counts where it is young: made less than ``reach`` steps ago, and used again less than ``reach`` steps on.
    So neither what all layers read (rotary tables), nor what they leave for the end of the graph, hides a border.
    The reach that shows the layers is tried out.
    """
    count = len(steps.nodes)
    uses = _uses(steps)
    best, best_cost = [(0, count)], float(count)
    reach = 16
    while reach < 2 * count:
        young = _young(uses, count, reach)
        for most in CROSSING:
            spans = _cut(steps, young, most)
            cost = _cost(steps, spans)
            if cost < best_cost:
                best, best_cost = spans, cost
        reach *= 2
    return best


def _uses(steps: Steps) -> list[tuple[int, list[int]]]:
    """Each step that later ones use, with their places; the graph's output is not counted."""
    found = []
    for place, node in enumerate(steps.nodes):
        if users := sorted(steps.place[user] for user in node.users if user in steps.place):
            found.append((place, users))
    return found


def _young(uses: Sequence[tuple[int, list[int]]], count: int, reach: int) -> list[int]:
    """How many young values cross the place in front of each step."""
    change = [0] * (count + 1)
    for made, users in uses:
        for earlier, user in pairwise((made, *users)):
            first, last = max(earlier + 1, user - reach + 1), min(user, made + reach)
            if first <= last:
                change[first] += 1
                change[last + 1] -= 1
    return list(accumulate(change))[:count]


def _cut(steps: Steps, young: Sequence[int], most: int) -> list[Span]:
    count = len(steps.nodes)
    # An item stays with the result that it is taken of, which is no tensor.
    cuts = {place for place in range(1, count) if young[place] <= most and not is_item(steps.nodes[place])}
    cuts |= {place for closed in steps.closed for place in (closed, closed + 1)}
    return list(pairwise(sorted({0, count} | cuts)))


def _cost(steps: Steps, spans: Sequence[Span]) -> float:
    """What compiling each kind of piece once costs, as a number of steps. A piece of a unique kind stays inline."""
    kinds = Counter(steps.local[first:last] for first, last in spans)
    return sum(len(kind) + (CALL * times if times > 1 else 0) for kind, times in kinds.items())
