"""What each call of a model's layers does with what its backward needs, so that a step fits a memory budget.

The last layers keep it, as many as fit: theirs is the first that backward frees. Layers between them and before them
keep it on the host, as many as the link has time for, and what comes back takes the memory of kept layers that backward
is through with. All others compute it again.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

MOST_LEAVING = 3
"""Layers' values that are on their way to the host at a time."""


class Choice(enum.Enum):
    """What a call of a layer does with what its backward needs."""

    AGAIN = "compute it again"
    KEEP = "keep it on the device"
    MOVE = "keep it on the host"


@dataclass(frozen=True)
class Role:
    """Of one layer's call in each forward.

    Attributes:
        leaves: the layer whose values, and those that moved before, have left the device before the call: compute waits
            for their copies.
        returns: the layer whose values come back from the host while backward is in this one.
    """

    choice: Choice = Choice.AGAIN
    leaves: int | None = None
    returns: int | None = None


def roles_of(
    layers: Mapping[int, Hashable],
    extra: Mapping[Hashable, float],
    room: float,
    copies: Mapping[Hashable, float],
) -> dict[int, Role]:
    """The roles of layers that do not compute all again, or that have to do with what others move.

    Args:
        layers: layer → kind, in the order of their calls.
        extra: kind → bytes that a call keeps; of a kind that is not in it none keep.
        room: for these bytes.
        copies: kind → how many layers' forwards a copy of these bytes takes; of a kind that is not in it none move.
    """
    names, kinds = list(layers), list(layers.values())
    sizes = [extra.get(kind, math.inf) for kind in kinds]
    spans = [copies.get(kind, math.inf) for kind in kinds]
    # The more leave the device at a time, the busier the link, and the more memory they need on their way.
    plans = [_plan(sizes, spans, room, most) for most in range(1, MOST_LEAVING + 1)]
    best = max(plans, key=lambda plan: len(plan.kept) + len(plan.moves))
    leaves = {move.leaves: names[move.layer] for move in best.moves}
    returns = {move.returns: names[move.layer] for move in best.moves}
    choices = dict.fromkeys(best.kept, Choice.KEEP) | {move.layer: Choice.MOVE for move in best.moves}
    roles = {
        name: Role(choices.get(at, Choice.AGAIN), leaves.get(at), returns.get(at)) for at, name in enumerate(names)
    }
    return {name: role for name, role in roles.items() if role != Role()}


@dataclass(frozen=True)
class _Move:
    """What a layer keeps leaves the device in front of ``leaves``, and returns while backward is in ``returns``."""

    layer: int
    leaves: int
    returns: int


@dataclass(frozen=True)
class _Plan:
    kept: Sequence[int]
    moves: Sequence[_Move]


def _plan(sizes: Sequence[float], spans: Sequence[float], room: float, most: int) -> _Plan:
    """With at most ``most`` layers' values on their way to the host at a time."""
    others = len(sizes) - len(_last_that_fit(sizes, room, ()))
    leaving = dict(itertools.islice(_leaving(spans, most).items(), others))
    while True:
        kept = _last_that_fit(sizes, room, leaving)
        moves = _moves(leaving, kept, sizes)
        if moves is not None:
            return _Plan(kept, moves)
        leaving.popitem()  # the last layers' memory is there for those in front of it


def _last_that_fit(sizes: Sequence[float], room: float, others: Collection[int]) -> list[int]:
    """The last layers but ``others`` whose bytes together are at most ``room``."""
    found = []
    for at in reversed([at for at in range(len(sizes)) if at not in others]):
        if math.isfinite(sizes[at]):
            room -= sizes[at]
            if room < 0:
                break
            found.append(at)
    return found


def _leaving(spans: Sequence[float], most: int) -> dict[int, int]:
    """Layers that move → the first one behind the end of their copy: one after the other, each behind its layer."""
    found: dict[int, int] = {}
    link_is_free = 0.0
    for at, span in enumerate(spans):
        starts = max(at + 1, link_is_free)
        waits_less_than_a_layer = starts < at + 2
        others = sum(leaves > at for leaves in found.values())
        if waits_less_than_a_layer and others < most and starts + span <= len(spans) - 1:
            link_is_free = starts + span
            found[at] = math.ceil(link_is_free)
    return found


def _moves(leaving: Mapping[int, int], kept: Collection[int], sizes: Sequence[float]) -> list[_Move] | None:
    """With where backward is when each layer's values start to come back: as early as there is memory for them.

    None: there is none, or none for what is on its way while layers are called that keep.
    """

    def freed(since: int) -> float:
        return sum(sizes[each] for each in kept if each >= since)

    def place(at: int, behind: int) -> int | None:
        """``behind``: the moved layer behind it, whose values are back before."""
        if behind == at + 1:  # they are still there
            return behind if freed(behind + 1) >= sizes[at] + sizes[behind] else None
        return next((place for place in reversed(range(at + 1, behind)) if freed(place + 1) >= sizes[at]), None)

    for called in range(len(sizes)):
        if sum(sizes[at] for at, leaves in leaving.items() if at <= called < leaves) > freed(called + 1):
            return None
    returns = [place(at, behind) for at, behind in itertools.pairwise([*leaving, len(sizes)])]
    found = [_Move(*move, back) for move, back in zip(leaving.items(), returns, strict=True) if back is not None]
    return found if len(found) == len(leaving) else None
