"""What each call of a model's layers does with what its backward needs, so that a step fits a memory budget.

The last layers keep it, as many as fit: theirs is the first that backward frees. Layers between them and before them
keep it on the host, so far apart that each copy has ended before the next one starts, and what comes back takes the
memory of kept layers that backward is through with. All others compute it again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


class Choice(enum.Enum):
    """What a call of a layer does with what its backward needs."""

    AGAIN = "compute it again"
    KEEP = "keep it on the device"
    MOVE = "keep it on the host"


@dataclass(frozen=True)
class Role:
    """Of one layer's call in each forward.

    Attributes:
        leaves: the layer whose values have left the device before the call: compute waits for their copy.
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
    apart = [max(1, math.ceil(copies[kind])) if kind in copies else len(kinds) for kind in kinds]
    # A layer that moves where the copy before it ends needs the memory of both.
    both = [_kept_and_moved(sizes, room, apart, space) for space in (apart, [each + 1 for each in apart])]
    kept, places = max(both, key=lambda each: len(each[1]))
    leaves = {at + apart[at] + 1: names[at] for at in places}
    returns = {place: names[at] for at, place in places.items()}
    choices = {**dict.fromkeys(kept, Choice.KEEP), **dict.fromkeys(places, Choice.MOVE)}
    roles = {
        name: Role(choices.get(at, Choice.AGAIN), leaves.get(at), returns.get(at)) for at, name in enumerate(names)
    }
    return {name: role for name, role in roles.items() if role != Role()}


def _kept_and_moved(
    sizes: Sequence[float], room: float, apart: Sequence[int], space: Sequence[int]
) -> tuple[list[int], dict[int, int]]:
    """Layers that keep, and those that move, ``space`` layers apart, with where backward is when they come back."""
    kept = _last_that_fit(sizes, room, ())
    moved = _far_apart(apart, space)[: len(sizes) - len(kept)] if kept else []
    while True:
        kept = _last_that_fit(sizes, room, moved)
        places = [place for place in _returns(moved, kept, sizes, apart) if place is not None]
        if len(places) == len(moved):
            return kept, dict(zip(moved, places, strict=True))
        moved.pop()  # the last layers' memory is there for those in front of it


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


def _far_apart(apart: Sequence[int], space: Sequence[int]) -> list[int]:
    """Layers that move: no copy starts before the one before has ended, and the last one ends in forward.

    A copy starts behind its layer, and so has ended behind the ``apart`` layers that follow.
    """
    found, free_at = [], 0
    for at, layers in enumerate(apart):
        if at >= free_at and at + layers + 1 < len(apart):
            found.append(at)
            free_at = at + space[at]
    return found


def _returns(
    moved: Sequence[int], kept: Collection[int], sizes: Sequence[float], apart: Sequence[int]
) -> list[int | None]:
    """Where backward is when each moved layer's values start to come back: as early as there is memory for them.

    None: there is none, or none for what the layers called behind it keep while its values leave.
    """

    def freed(since: int) -> float:
        return sum(sizes[each] for each in kept if each >= since)

    def place(at: int, behind: int) -> int | None:
        """``behind``: the moved layer behind it, whose values are back before."""
        ends = at + apart[at]
        if freed(ends + 1) < sizes[at] + (sizes[ends] if ends in moved else 0.0):
            return None
        if behind == at + 1:  # they are still there
            return behind if freed(behind + 1) >= sizes[at] + sizes[behind] else None
        return next((place for place in reversed(range(at + 1, behind)) if freed(place + 1) >= sizes[at]), None)

    return [place(*pair) for pair in pairwise([*moved, len(sizes)])]
