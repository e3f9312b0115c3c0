"""What layers take and how long they run, measured, so that a step fits a memory budget.

All calls of a layer's compiled code cost the same, so what one takes is measured and not predicted: by how much more is
allocated behind a call that keeps than behind one that computes again. The most that was allocated in a step says what
all else takes. ``layer_roles`` decides by that which layers keep what backward needs, and where.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from glue_compiler.byte_sizes import with_unit
from glue_compiler.memory.layer_roles import Choice, LayerInput, Role, roles_of
from glue_compiler.memory.moved_calls import Mover
from glue_compiler.ops.device_memory import memory_of
from glue_compiler.ops.host_link import link_rate

log = logging.getLogger(__name__)

Budget = int | float | str
SHARE = 0.97
"""Of the budget is planned for: blocks of the allocator are larger than what lies in them."""
MARGIN = 0.05
"""The share of the card that ``"auto"`` leaves for what no step shows: workspaces, and holes between tensors."""
CLEARLY_LESS = 0.95
"""Of the time that is known of a layer."""


class Memory(Protocol):
    """Of one device, in bytes: what tensors hold, the most that they ever held, and what a budget comes to now.

    And its time: ``clock`` marks a place in what it computes, ``seconds`` lie between two, None if it is not there yet.
    ``link``: bytes a second to the host.
    """

    def allocated(self) -> int: ...

    def peak(self) -> int: ...

    def forget_peak(self) -> None: ...

    def limit(self, budget: Budget) -> int: ...

    def clock(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float | None: ...

    def link(self) -> float: ...


@dataclass(frozen=True)
class CudaMemory:
    """Of a CUDA device. Torch's statistics are the user's: they are read, and the peak is reset once if need be."""

    device: torch.device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def limit(self, budget: Budget) -> int:
        if isinstance(budget, int):
            return budget
        memory = memory_of(self.device)
        assert memory is not None
        if budget != "auto":
            return int(float(budget) * memory.total)
        # What tensors hold already counts in a step's peak.
        return max(0, memory.free + memory.unused + self.allocated() - int(MARGIN * memory.total))

    def clock(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float | None:
        return start.elapsed_time(end) / 1e3 if end.query() else None

    def link(self) -> float:
        return link_rate(self.device)


def memory_on(device: torch.device) -> Memory | None:
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class Before:
    """A call's device, before it: bytes that tensors hold, if that is asked, and the place in what it computes."""

    allocated: int | None
    clock: Any


@dataclass(frozen=True)
class Call:
    """Of a layer, before it runs.

    Attributes:
        layer: stands for the layer in all of its calls.
        kind: layers that take the same for each unit.
        units: how large its input is.
        input_bytes: what is free when the input lies on the host; 0: it has to stay.
        gradients: the most bytes that its backward leaves.
    """

    layer: int
    kind: Hashable
    units: int
    input_bytes: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class _Besides:
    """What a step takes beside what its layers keep, at the most.

    Attributes:
        begun: bytes that tensors held in front of it. What is there for longer, as an optimiser's state, makes it more.
        is_hidden: by a peak of an earlier time, so that the step itself takes less.
    """

    nbytes: int
    begun: int
    is_hidden: bool

    def at(self, begun: int) -> int:
        return self.nbytes + max(0, begun - self.begun)


class _Round:
    """A forward through the layers, whose backward has not come to the first of them yet."""

    has_run = False


REMEMBERED = 8
"""Rounds in which a layer is not called before it is forgotten: some may be dropped in a round, or replaced."""


class LayerPlan:
    """Of one device. Whatever it decides, results are the same: threads may share it, and at worst it decides badly.

    A round is a forward through the layers, of which some may be left out; a step begins with a round while no other
    one waits for its backward.

    Args:
        budget: as the user wrote it.

    Attributes:
        told: called with a sentence when another number of layers keeps.
        mover: runs their calls.
    """

    def __init__(self, budget: Budget, memory: Memory) -> None:
        self._budget, self._memory = budget, memory
        self.told: list[Callable[[str], None]] = []
        self.mover = Mover()
        self._layers: dict[int, Hashable] = {}
        """Layer → its kind, in the order of their calls."""
        self._calls: dict[int, Call] = {}
        """Layer → its latest call."""
        self._last_called: int | None = None
        self._seen_in: dict[int, int] = {}
        """Layer → the number of the round in which it was called last."""
        self._round, self._has_node = 0, False
        self._lock = threading.RLock()
        self._roles: dict[int, Role] = {}
        """Layer → its role; all others compute again."""
        self._asked: tuple[Any, ...] | None = None
        self._answer: dict[int, Role] = {}
        """What ``layer_roles`` was asked last, and what it said: a step asks again, and it takes milliseconds."""
        self._grown: dict[tuple[Hashable, bool], float] = {}
        """(kind, does it keep?) → bytes for each unit by which a call makes what is allocated grow."""
        self._seconds: dict[Hashable, float] = {}
        """Kind → of a forward, for each unit."""
        self._timed: list[tuple[Hashable, int, Any, Any]] = []
        self._clocked: set[Hashable] = set()
        """Kinds of which a call of this step is timed."""
        self._besides: dict[int, _Besides] = {}
        """By units of a step."""
        self._waiting: list[weakref.ref[_Round]] = []
        self._units, self._rounds, self._most_rounds = 0, 0, 1
        self._kept: Counter[Hashable] = Counter()
        """Kind → units of the calls of this step that keep."""
        self._left, self._inputs_stay = 0, False
        """Bytes of the inputs of this step that lie on the host; does somebody else hold them, too?"""
        self._peak, self._begun, self._steps = 0, 0, 0
        self._seen = 0
        """The peak when backward came to the first layer: behind it the user may reset what torch has counted."""
        self._has_compiled, self._measures = True, True
        self._limit: int | None = None
        self._has_forgotten = False

    def compiles(self) -> None:
        """Code of a layer is compiled: what this step takes shows nothing."""
        self._has_compiled = True

    def role(self, call: Call) -> Role:
        """Of this call of a layer."""
        with self._lock:
            if self._begins_a_round(call.layer):
                self._begin_round(call.units)
            self._note(call)
            return self._roles.get(call.layer, Role())

    def called(self, call: Call, role: Role, before: Before | None, outputs: Sequence[Any]) -> None:
        """A call that :meth:`role` was asked about has run; ``before``: what :meth:`before_call` said."""
        with self._lock:
            if call.layer in self._layers:  # other threads may have forgotten it
                self._called(call, role, before, outputs)

    def _called(self, call: Call, role: Role, before: Before | None, outputs: Sequence[Any]) -> None:
        kind, units, kept = call.kind, call.units, role.choice is Choice.KEEP
        if before is not None and not self._has_compiled:
            if before.allocated is not None:
                grown = (self._memory.allocated() - before.allocated) / max(1, units)
                self._grown[kind, kept] = min(grown, self._grown.get((kind, kept), grown))
            self._timed.append((kind, units, before.clock, self._memory.clock()))
        if kept:
            self._kept[kind] += units
        if role.moves_input:
            self._left += call.input_bytes
        if not self._has_node:
            self._wait_for_backward(outputs)

    def before_call(self, call: Call, role: Role) -> Before | None:
        """None where it is not asked for, as the host takes a while to count what is allocated.

        One call of a kind is timed in each step: the first steps of a process may share the device with others.
        """
        if self._measures:
            return Before(self._memory.allocated(), self._memory.clock())
        if role.leaves is not None or call.kind in self._clocked:
            return None
        self._clocked.add(call.kind)
        return Before(None, self._memory.clock())

    def ran_out(self) -> None:
        """A call that keeps found no memory: the next step takes less than was there."""
        self._limit = min(self._limit or self._peak, int(SHARE * self._memory.peak()))
        self._roles = {}

    def _wait_for_backward(self, outputs: Sequence[Any]) -> None:
        node = next((each.grad_fn for each in outputs if getattr(each, "grad_fn", None) is not None), None)
        if node is None:
            return
        # The graph holds the round, so that a graph that is dropped without a backward is no longer waited for.
        this_round = node.metadata[self] = _Round()
        waiting = weakref.ref(this_round)

        def has_run(_: Any) -> None:
            self._seen = max(self._seen, self._memory.peak())
            if (found := waiting()) is not None:
                found.has_run = True

        node.register_prehook(has_run)
        self._waiting.append(waiting)
        self._has_node = True

    def _begins_a_round(self, layer: int) -> bool:
        """Is a layer called that comes before the last one that was, or has backward run since?"""
        if self._last_called is None or (self._has_node and not self._waits(self._waiting[-1])):
            return True
        order = list(self._layers)
        place = order.index(layer) if layer in self._layers else len(order)
        return not place or place < order.index(self._last_called)

    def _note(self, call: Call) -> None:
        layer = call.layer
        if layer not in self._layers:  # behind the one that was called before it
            order = list(self._layers.items())
            at = 0 if self._last_called is None else list(self._layers).index(self._last_called) + 1
            self._layers = dict([*order[:at], (layer, call.kind), *order[at:]])
        self._last_called, self._seen_in[layer], self._calls[layer] = layer, self._round, call

    @staticmethod
    def _waits(waiting: weakref.ref[_Round]) -> bool:
        return (found := waiting()) is not None and not found.has_run

    def _begin_round(self, units: int) -> None:
        self._waiting = [each for each in self._waiting if self._waits(each)]
        if not self._waiting:
            self._begin_step(units)
        self._rounds += 1
        self._round, self._last_called, self._has_node = self._round + 1, None, False
        for layer in [each for each, seen in self._seen_in.items() if self._round - seen > REMEMBERED]:
            del self._seen_in[layer], self._layers[layer], self._calls[layer]

    def _begin_step(self, units: int) -> None:
        self._look_back()
        self._most_rounds = max(self._most_rounds, self._rounds)
        self._units, self._rounds, self._kept, self._left, self._has_compiled = units, 0, Counter(), 0, False
        self._clocked = set()
        self._steps += 1
        self._peak, self._seen, self._begun = self._memory.peak(), 0, self._memory.allocated()
        roles = self._choose(units)
        if roles != self._roles and len(self._grown) > 1:
            extra, moving = self._extra(), sum(role.choice is Choice.MOVE for role in roles.values())
            keeping = [layer for layer, role in roles.items() if role.choice is Choice.KEEP]
            kept = sum(extra.get(self._layers[layer], 0.0) for layer in keeping) * units * self._most_rounds
            moved = f", {moving} on the host" if moving else ""
            inputs = sum(role.moves_input for role in roles.values())
            moved += f", {inputs} layers' inputs on the host" if inputs else ""
            text = (
                f"{len(keeping)} of {len(self._layers)} layers keep what backward needs: {with_unit(int(kept))}, with "
                f"{with_unit(self._limit or 0)} for a step{moved}"
            )
            log.info(text)
            for tell in self.told:
                tell(text)
        self._roles = roles

    def _look_back(self) -> None:
        """At the step that is over: how long were its calls, and what does one take in which none keep or move?"""
        timed, self._timed = self._timed, []
        for kind, units, start, end in timed:
            seconds = self._memory.seconds(start, end)
            if seconds is not None:
                each = seconds / max(1, units)
                known = self._seconds.get(kind)
                if known is None or each < CLEARLY_LESS * known:  # else roles change for nothing
                    self._seconds[kind] = each
        if self._has_compiled or not self._rounds:
            return
        peak, extra = max(self._seen, self._memory.peak()), self._extra()
        besides = peak - int(sum(extra.get(kind, 0.0) * units for kind, units in self._kept.items())) + self._left
        before = self._besides.get(self._units)
        expected = besides if before is None else before.at(self._begun)
        if self._limit is not None and peak > max(self._peak, self._limit):
            # Such as a list of all hidden states. Where it is less, a plan for less helps.
            self._inputs_stay |= 0 < self._left <= 2 * (besides - expected)
            more = max(0, besides - expected)
            self._besides = {units: replace(each, nbytes=each.nbytes + more) for units, each in self._besides.items()}
        # The peak of an earlier time, or of an evaluation in between, is more than this step's.
        if before is None or besides < expected:
            self._besides[self._units] = _Besides(besides, self._begun, is_hidden=peak <= self._peak)

    def _choose(self, units: int) -> dict[int, Role]:
        if self._steps == 1:
            return {}
        extra = self._extra()
        last_of_kinds = {kind: layer for layer, kind in self._layers.items()}
        self._measures = not self._besides or len(extra) < len(last_of_kinds)
        if self._measures:
            # One layer of each kind shows what it takes to keep.
            return {layer: Role(Choice.KEEP) for kind, layer in last_of_kinds.items() if kind not in extra}
        if self._limit is None:
            self._limit = self._memory.limit(self._budget)
        if self._is_hidden(extra):
            # The step after the next one shows what a step takes.
            self._memory.forget_peak()
            self._besides, self._peak, self._has_forgotten = {}, 0, True
            return {}
        room = SHARE * self._limit - self._expected(units)
        needed = {kind: each * units * self._most_rounds for kind, each in extra.items()}
        asked = (tuple(self._layers.items()), needed, room, self._copies(extra), self._inputs(units))
        if asked != self._asked:
            self._asked, self._answer = asked, roles_of(dict(asked[0]), *asked[1:])
        return self._answer

    def _is_hidden(self, extra: Mapping[Hashable, float]) -> bool:
        """Is the highest peak of an earlier time, as of loading weights, so high that no step could show its own?"""
        assert self._limit is not None
        known = self._besides.get(self._units)
        if self._has_forgotten or known is None or not known.is_hidden:
            return False
        return self._memory.peak() + max(extra.values()) * self._units * self._most_rounds > SHARE * self._limit

    def _copies(self, extra: Mapping[Hashable, float]) -> dict[Hashable, float]:
        """Kind → how many of its layers' forwards a copy of what one keeps takes; not where forwards share memory."""
        if self._most_rounds > 1:
            return {}
        rate = self._memory.link()
        return {kind: extra[kind] / rate / self._seconds[kind] for kind in extra if self._seconds.get(kind)}

    def _inputs(self, units: int) -> dict[int, LayerInput]:
        """Layer → its input, of those that may move."""
        if self._most_rounds > 1 or self._inputs_stay:
            return {}
        found, rate = {}, self._memory.link()
        for layer, call in self._calls.items():
            each, seconds = call.input_bytes / max(1, call.units), self._seconds.get(call.kind)
            if seconds:
                found[layer] = LayerInput(each * units, each / rate / seconds, call.gradients)
        return found

    def _extra(self) -> dict[Hashable, float]:
        """Kind → bytes for each unit that a call keeps beside what one holds that computes again."""
        both = {kind for kind, kept in self._grown if kept and (kind, False) in self._grown}
        return {kind: max(0.0, self._grown[kind, True] - self._grown[kind, False]) for kind in both}

    def _expected(self, units: int) -> float:
        """What a step of ``units`` takes beside what layers keep: what is there now, and what grows with the units."""
        if units in self._besides:
            return self._besides[units].at(self._begun)
        largest = max(self._besides)
        most = self._besides[largest].at(self._begun)
        base = min(self._begun, most)
        return base + (most - base) * units / largest
