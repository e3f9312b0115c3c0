"""What a choice costs: the most bytes on the device at a time, and the seconds of a step.

Counted is what the graph can see: inputs, which stay; saved values, and the gradients that backward gets, until their
last use; those that it returns to the end; and what is alive at one place. Values that a compiler fuses count only
where a kernel comes between them and their use; what is pointwise is computed in each of its readers, as Inductor does.
What an operator takes for itself counts where it was measured. Not counted: optimiser states, gradients of earlier
steps, and other graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from glue_compiler.fx.fused_reads import FusedLives, fused_lives
from glue_compiler.ops.device_rates import Rates
from glue_compiler.passes.plan_memory.choose import Choice
from glue_compiler.passes.plan_memory.in_place import written_in_place
from glue_compiler.passes.plan_memory.moves import Times, copying_seconds
from glue_compiler.passes.plan_memory.step import TrainingStep


@dataclass(frozen=True)
class Prediction:
    """``seconds`` of a step, ``peak`` bytes."""

    seconds: float
    peak: int


@dataclass(frozen=True)
class _Backward:
    """What backward computes for a choice.

    Attributes:
        order: places; first: of each memory, where in ``order`` it is read first; again: what is recomputed after all.
        begins: by segment, where in ``order`` its backward begins, as far as it reads its values; duration: seconds.
    """

    order: Sequence[int]
    first: Mapping[int, int]
    again: Collection[int]
    begins: Mapping[int, int]
    duration: Mapping[int, float]


class Predictor:
    """Predicts choices over one step.

    Args:
        home: the segment of each value that a choice names.
        fuses: does a compiler fuse what lies between kernels? Else every value is in memory.
    """

    def __init__(self, step: TrainingStep, home: Mapping[int, int], rates: Rates, *, fuses: bool = True) -> None:
        self.step, self.home, self.rates = step, home, rates
        self._fuses = fuses
        self._seconds = [
            value.seconds if value.is_kernel or place in step.realised else 0.0
            for place, value in enumerate(step.values)
        ]
        self._operands = [frozenset(step.values[read].root for read in value.inputs) for value in step.values]
        self._orders: dict[Choice, _Backward] = {}
        self._predicted: dict[tuple[Choice, frozenset[int]], Prediction] = {}
        self._groups: dict[Choice, Mapping[int, int]] = {}
        self._backward = [place for place, value in enumerate(step.values) if value.is_backward]
        self._forward_index = {place: index for index, place in enumerate(step.forward)}
        segments = sorted(set(home.values()) | {0})
        self._ends = self._forward_ends(segments)
        self._time_of_forward = dict.fromkeys(segments, 0.0)
        for place in step.forward:
            if place in home:
                self._time_of_forward[home[place]] += self._seconds[place]
        self._base_seconds = sum(self._seconds[place] for place in (*step.forward, *self._backward))

    def predict(self, choice: Choice, moved: frozenset[int] = frozenset()) -> Prediction:
        """``moved``: of what is saved, what waits for backward on the host; each is in :meth:`groups`."""
        key = choice, moved
        if key not in self._predicted:
            back = self._order_of_backward(choice)
            ahead, behind = self.bytes_beside_inputs(choice, moved)
            peak = self.step.input_bytes + max(*ahead, *behind, 0)
            self._predicted[key] = Prediction(self._time(choice, moved, back), peak)
        return self._predicted[key]

    def copying(self, choice: Choice, moved: Collection[int]) -> float:
        """Seconds that copies add to a step."""
        return copying_seconds(self.step, self.groups(choice), moved, self.times(choice), self.rates)

    def times(self, choice: Choice) -> Times:
        return Times(self._time_of_forward, self._order_of_backward(choice).duration)

    def groups(self, choice: Choice) -> Mapping[int, int]:
        """By value, the segment whose values it would be moved with: the one that computes from it again, else its own.

        What several segments compute from, or what backward reads before it comes to the segment behind, is needed all
        through backward, and is not there.
        """
        if choice not in self._groups:
            back = self._order_of_backward(choice)
            readers: dict[int, set[int]] = {}
            for place in choice.recomputed:
                for root in self._operands[place]:
                    if root in self.home and self.home[root] != self.home[place]:
                        readers.setdefault(root, set()).add(self.home[place])
            groups = {place: min(readers.get(place, {number})) for place, number in self.home.items()}
            self._groups[choice] = {
                place: number
                for place, number in groups.items()
                if len(readers.get(place, ())) <= 1
                and back.first.get(place, len(back.order)) >= back.begins.get(number + 1, 0)
            }
        return self._groups[choice]

    def _time(self, choice: Choice, moved: Collection[int], back: _Backward) -> float:
        extra = sum(self._seconds[place] for place in back.again)
        written = sum(self.step.values[p].nbytes for p in choice.saved if p not in self.step.realised)
        read = sum(self.step.values[p].nbytes for p in choice.saved)
        traffic = (written + read) / self.rates.memory
        return self._base_seconds + extra + traffic + self.copying(choice, moved)

    def bytes_beside_inputs(self, choice: Choice, moved: Collection[int] = ()) -> tuple[list[int], list[int]]:
        """At each place of what forward computes, and of what backward does."""
        return self._bytes_in_forward(choice, moved), self._bytes_in_backward(choice, moved)

    def _forward_ends(self, segments: Sequence[int]) -> dict[int, int]:
        """By segment, the place in the forward's order behind its last value."""
        ends: dict[int, int] = {}
        for place, index in self._forward_index.items():
            if place in self.home:
                number = self.home[place]
                ends[number] = max(ends.get(number, 0), index + 1)
        for before, number in pairwise(segments):
            ends[number] = max(ends.get(number, 0), ends.get(before, 0))
        return ends

    def _order_of_backward(self, choice: Choice) -> _Backward:
        if choice not in self._orders:
            order, first, again = self._ordered(choice)
            self._orders[choice] = _Backward(order, first, again, *self._segments_in_backward(order))
        return self._orders[choice]

    def _ordered(self, choice: Choice) -> tuple[list[int], dict[int, int], list[int]]:
        """What is recomputed stands in front of its first reader."""
        values, order, done = self.step.values, [], set(choice.saved)
        again: list[int] = []
        for place in self._backward:
            needed: set[int] = set()
            waiting = list(values[place].inputs)
            while waiting:
                read = waiting.pop()
                if not (read in done or read in needed or values[read].is_backward or values[read].is_input):
                    needed.add(read)
                    waiting += values[read].inputs
            order += [*sorted(needed), place]
            again += needed
            done |= needed
        first: dict[int, int] = {}
        for index, place in enumerate(order):
            for root in self._operands[place]:
                first.setdefault(root, index)
        return order, first, again

    def _memories(self, order: Sequence[int], choice: Choice) -> FusedLives[int]:
        """When each memory is written and read, and the values that are in none."""
        values, realised = self.step.values, self.step.realised
        places = {place: index for index, place in enumerate(order) if values[place].root == place}

        def may_inline(place: int) -> bool:
            stays = place in realised or place in choice.saved
            return self._fuses and values[place].is_pointwise and not stays

        def is_written(place: int) -> bool:
            return self._fuses and values[place].is_pointwise and place in realised

        def size(place: int) -> int:
            return values[place].nbytes

        return fused_lives(places, self._operands.__getitem__, may_inline, is_written, size)

    def _segments_in_backward(self, order: Sequence[int]) -> tuple[dict[int, int], dict[int, float]]:
        """By segment, where its backward begins in ``order`` (as far as it reads its values), and its seconds."""
        begins: dict[int, int] = {}
        for index, place in enumerate(order):
            for read in (place, *self.step.values[place].inputs):
                if read in self.home:
                    begins.setdefault(self.home[read], index)
        marks = sorted((index, number) for number, index in begins.items())
        times = [0.0, *accumulate(self._seconds[place] for place in order)]
        duration = {}
        for (start, number), (end, _) in zip(marks, [*marks[1:], (len(order), -1)], strict=True):
            duration[number] = times[end] - times[start]
        return begins, duration

    def _bytes_in_forward(self, choice: Choice, moved: Collection[int]) -> list[int]:
        values, index = self.step.values, self._forward_index
        memories = self._memories(self.step.forward, choice)
        end, groups = len(index), self.groups(choice)
        kept = (choice.saved - set(moved)) | {values[place].root for place in self.step.outputs}
        lives = []
        for place, at in index.items():
            if not values[place].nbytes or place in memories.inlined:
                continue
            over = memories.last.get(place, at)
            counts = place in self.step.realised or place in choice.saved
            if place in kept:
                over, counts = end - 1, True
            elif place in moved:
                over = max(over, self._ends.get(groups[place] + 1, end) - 1)
            lives.append((place, at, over, counts))
        return self._bytes_at(list(self.step.forward), lives, memories, kept | choice.saved)

    def _bytes_in_backward(self, choice: Choice, moved: Collection[int]) -> list[int]:
        back = self._order_of_backward(choice)
        values, order = self.step.values, back.order
        memories = self._memories(order, choice)
        last = memories.last
        lives, groups = [], self.groups(choice)
        for place in choice.saved:
            if place in last and values[place].nbytes:
                start = back.begins.get(groups[place] + 1, 0) if place in moved else 0
                lives.append((place, min(start, back.first[place]), last[place], True))
        kept = {values[place].root for place in self.step.gradients}
        for at, place in enumerate(order):
            if values[place].nbytes and place not in choice.saved and place not in memories.inlined:
                over = len(order) - 1 if place in kept else last.get(place, at)
                counts = values[place].is_input or place in self.step.realised or place in kept
                lives.append((place, at, over, counts))
        return self._bytes_at(order, lives, memories, kept | choice.saved)

    def _bytes_at(
        self,
        order: Sequence[int],
        lives: Sequence[tuple[int, int, int, bool]],
        memories: FusedLives[int],
        stays: Collection[int],
    ) -> list[int]:
        """Bytes on the device at each place of ``order``.

        ``lives``: the value, its first and last place in ``order``, and whether it counts even if no kernel lies
        between the two; ``stays``: what nothing is written over."""
        kernels = self.step.kernels_before(order)
        ends = {
            place: (at, over)
            for place, at, over, counts in lives
            if counts or not self._fuses or kernels[over] > kernels[min(at + 1, len(order))]
        }
        found = written_in_place(self.step.values, order, kernels, ends, memories, stays) if self._fuses else ends
        values = self.step.values
        changes = [0] * (len(order) + 1)
        for place, (at, over) in found.items():
            changes[min(at, memories.first.get(place, at))] += values[place].nbytes
            changes[over + 1] -= values[place].nbytes
        alive = accumulate(changes[:-1])
        return [held + values[place].scratch for held, place in zip(alive, order, strict=True)] or [0]
