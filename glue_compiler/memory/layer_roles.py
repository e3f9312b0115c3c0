"""What each call of a model's layers does with what its backward needs, so that a step fits a memory budget.

The last layers keep it, as many as fit: theirs is the first that backward frees. Layers between them and before them
keep it on the host, as many as the link has time for, and what comes back takes the memory of kept layers that backward
is through with. All others compute it again. Where more layers keep by that, the inputs of those that do not keep lie
on the host, too.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

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
        returns: the layers whose values come back from the host while backward is in this one, in this order.
        moves_input: does the call's input lie on the host until backward?
    """

    choice: Choice = Choice.AGAIN
    leaves: int | None = None
    returns: tuple[int, ...] = ()
    moves_input: bool = False


@dataclass(frozen=True)
class LayerInput:
    """What a layer holds that computes again.

    Attributes:
        size: bytes that are free when it lies on the host.
        span: how many layers' forwards a copy takes.
        gradients: the most bytes that the layer's backward leaves: they take the place of inputs that it frees.
    """

    size: float = 0.0
    span: float = 0.0
    gradients: float = 0.0


def roles_of(
    layers: Mapping[int, Hashable],
    extra: Mapping[Hashable, float],
    room: float,
    copies: Mapping[Hashable, float],
    inputs: Mapping[int, LayerInput] = MappingProxyType({}),
) -> dict[int, Role]:
    """The roles of layers that do not compute all again, or that have to do with what others move.

    Args:
        layers: layer → kind, in the order of their calls.
        extra: kind → bytes that a call keeps; of a kind that is not in it none keep.
        room: for these bytes, beside a step in which all layers compute again and all inputs stay.
        copies: kind → how many layers' forwards a copy of these bytes takes; of a kind that is not in it none move.
        inputs: layer → its input; of a layer that is not in it it stays.
    """
    names = list(layers)
    staying = [_Layer(kind, extra.get(kind, math.inf), copies.get(kind, math.inf)) for kind in layers.values()]
    leaving = [replace(each, input=inputs.get(name, LayerInput())) for name, each in zip(names, staying, strict=True)]
    # The more leave the device at a time, the busier the link, and the more memory they need on their way.
    most = range(1, MOST_LEAVING + 1)
    plans = [_plan(each, room, at_once) for each in ([staying, leaving] if inputs else [staying]) for at_once in most]
    best = max(plans, key=lambda plan: len(plan.kept) + len(plan.moved))
    choices = dict.fromkeys(best.kept, Choice.KEEP) | dict.fromkeys(best.moved, Choice.MOVE)
    leaves = {copy.leaves: names[at] for at, copy in best.copies.items()}
    inputs_move = {at for at, copy in best.copies.items() if copy.input}
    returns: dict[int, tuple[int, ...]] = {}
    for at, place in best.returns.items():
        returns[place] = (*returns.get(place, ()), names[at])
    roles = {
        name: Role(choices.get(at, Choice.AGAIN), leaves.get(at), returns.get(at, ()), at in inputs_move)
        for at, name in enumerate(names)
    }
    return {name: role for name, role in roles.items() if role != Role()}


@dataclass(frozen=True)
class _Layer:
    """``size``: bytes that it keeps. ``span``: how many forwards their copy takes. ``input``: what of it may leave."""

    kind: Hashable
    size: float
    span: float
    input: LayerInput = LayerInput()


@dataclass(frozen=True)
class _Copy:
    """What leaves the device of one layer, in front of the call of ``leaves``."""

    leaves: int
    values: bool
    input: bool


@dataclass(frozen=True)
class _Plan:
    """Which layers keep, and of which something is copied.

    Attributes:
        returns: layer → the one in whose backward its copy starts to return; inputs come first.
    """

    kept: Sequence[int] = ()
    copies: Mapping[int, _Copy] = field(default_factory=dict)
    returns: Mapping[int, int] = field(default_factory=dict)

    @property
    def moved(self) -> list[int]:
        return [at for at, copy in self.copies.items() if copy.values]


def _plan(layers: Sequence[_Layer], room: float, most: int) -> _Plan:
    """With at most ``most`` layers' values on their way to the host at a time."""
    moved = _that_move(layers, most)[: len(layers) - len(_last_that_fit(layers, room, ()))]
    kept = _last_that_fit(layers, room, moved)
    while kept or moved:
        copies = _copies(layers, kept, lambda at, *_: at in moved)
        returns = _returns(layers, room, kept, copies)
        if returns is not None:
            return _Plan(kept, copies, returns)
        if moved:
            moved.pop()  # the last layers' memory is there for those in front of it
            kept = _last_that_fit(layers, room, moved)
        else:
            kept.pop()
    return _Plan()


def _last_that_fit(layers: Sequence[_Layer], room: float, moved: Collection[int]) -> list[int]:
    """The last layers but those ``moved`` that may keep, as far as the end of forward shows, when all has left."""
    copies = _copies(layers, (), lambda at, *_: at in moved)
    left = {at: layers[at].input.size for at, copy in copies.items() if copy.input}
    room += sum(left.values())
    found = []
    for at in reversed([at for at in range(len(layers)) if at not in moved]):
        if math.isfinite(layers[at].size):
            room -= layers[at].size + left.get(at, 0.0)
            if room < 0:
                break
            found.append(at)
    return found


def _that_move(layers: Sequence[_Layer], most: int) -> list[int]:
    """Layers that move what they keep, as many as the link has time for beside the inputs of others."""
    found: list[int] = []

    def moves(at: int, starts: float, copies: Mapping[int, _Copy]) -> bool:
        waits_less_than_a_layer = starts < at + 2
        others = sum(copies[each].leaves > at for each in found)
        if waits_less_than_a_layer and others < most and starts + layers[at].span <= len(layers) - 1:
            found.append(at)
        return at in found

    _copies(layers, (), moves)
    return found


def _copies(
    layers: Sequence[_Layer], kept: Collection[int], moves: Callable[[int, float, Mapping[int, _Copy]], bool]
) -> dict[int, _Copy]:
    """Of layers, one copy after the other, each behind its layer; what would end behind the last layer's call stays.

    Args:
        moves: does this layer move its values, whose copy starts then, behind these?
    """
    found: dict[int, _Copy] = {}
    link_is_free = 0.0
    for at in [at for at in range(len(layers)) if at not in kept]:
        layer, starts = layers[at], max(at + 1, link_is_free)
        values = moves(at, starts, found)
        ends = starts + (layer.span if values else 0.0)
        with_input = ends + layer.input.span
        # Compute waits for whole layers' copies: the memory of values is not to be held for their input's sake.
        moves_input = layer.input.size > 0 and with_input <= (math.ceil(ends) if values else len(layers) - 1)
        ends = with_input if moves_input else ends
        if (values or moves_input) and ends <= len(layers) - 1:
            link_is_free, found[at] = ends, _Copy(math.ceil(ends), values, moves_input)
    return found


def _returns(
    layers: Sequence[_Layer], room: float, kept: Collection[int], copies: Mapping[int, _Copy]
) -> dict[int, int] | None:
    """Where what has left starts to return: an input one layer before its own, values as early as there is memory.

    None: at some place of the step there is none. Its places: the call of each layer, what is behind all layers, and
    the backward of each.
    """
    count = len(layers)
    changes = [0.0] * (2 * count + 2)

    def hold(nbytes: float, since: int, until: int) -> None:
        changes[since] += nbytes
        changes[until + 1] -= nbytes

    copied = {}
    for at, layer in enumerate(layers):
        copy = copies.get(at, _Copy(0, False, False))
        copied[at] = (layer.size if copy.values else 0.0) + (layer.input.size if copy.input else 0.0)
        hold((layer.size if at in kept else 0.0) + (0.0 if copy.input else layer.input.size), at, 2 * count - at)
        if at in copies:
            hold(copied[at], at, copy.leaves - 1)
            hold(copied[at], 2 * count - at - (not copy.values), 2 * count - at)
    free = [most - held for most, held in zip(_most(layers, room), itertools.accumulate(changes), strict=False)]
    found = {at: at + 1 for at, copy in copies.items() if not copy.values}
    behind = count
    for at in reversed([at for at, copy in copies.items() if copy.values]):
        place = at  # its own place, and that of the moved layer behind it, hold their values already
        while place < max(at + 1, behind - 1) and free[2 * count - place - 1] >= copied[at]:
            place += 1
        if place == at:
            return None
        found[at], behind = place, at
    return found if min(free) >= 0 else None


def _most(layers: Sequence[_Layer], room: float) -> list[float]:
    """What may be there at each place of a step, of values and of inputs that could leave.

    Of all places, one is known of a step in which all compute again: what all else takes there is at most what it takes
    in all, less the inputs that are there. The call of a layer takes no more than a later one of its kind, at which
    more inputs are there; so does its backward, but for the gradients that were made in between.
    """
    sizes = [layer.input.size for layer in layers]
    inputs = list(itertools.accumulate(sizes))
    shrinks = list(itertools.accumulate(layer.input.size - layer.input.gradients for layer in layers))
    last = {layer.kind: at for at, layer in enumerate(layers)}
    lasts = [last[layer.kind] for layer in layers]
    forward = [room + inputs[at] for at in lasts]
    backward = [room + inputs[at] + max(0.0, shrinks[end] - shrinks[at]) for at, end in enumerate(lasts)]
    return [*forward, room + sum(sizes), *reversed(backward)]
