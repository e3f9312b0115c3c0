"""Lets Dynamo trace what a loop over experts does for experts without rows, where it would have to look at the data.

``for e in hit.nonzero(): ...`` is traced as a loop over all experts, and ``if rows.numel() == 0: continue`` as if there
were rows. That is another program unless the code does nothing for an expert without rows. The Python code decides one
half, here: it must leave nothing behind but tensors. The other half is in the graph, and proved by ``group_experts``,
which marks the regions that it has proved; a frame with any other region is converted again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import fx

from glue_compiler.capture import bytecode, harmless, list_growth
from glue_compiler.capture.counted_loops import STEP, TRACED, CountedLoop, counted_loop
from glue_compiler.capture.list_growth import Growth
from glue_compiler.capture.regions import (
    HITS,
    REGIONS,
    Loops,
    NonEmptyBranch,
    SpeculativeRegion,
    UnrolledLoop,
    counted_sum,
)
from glue_compiler.capture.row_conditions import row_condition
from glue_compiler.compat import dynamo_frames, dynamo_tracing, harmless_values, known_index
from glue_compiler.fx.values import is_call, value_of

MOST_EXPERTS = 2048
"""Loops over more are left to Dynamo: each iteration is traced."""
_CAT = {torch.cat, torch.concat, torch.concatenate}


@dataclass
class SpeculativeRegions(dynamo_tracing.TracingObserver):
    """The regions of the frame that is being converted.

    ``shortened``: loops whose last position is left out, by code object and position in it. ``kinds``: of
    loops, others are left to Dynamo.
    """

    shortened: frozenset[tuple[CodeType, int]] = frozenset()
    kinds: Loops = Loops.EXPERTS | Loops.COUNTED
    regions: list[SpeculativeRegion] = field(default_factory=list)
    overran: set[tuple[CodeType, int]] = field(default_factory=set)
    """The loops whose body cannot run for the last position, named as in ``shortened``."""
    _open: list[SpeculativeRegion] = field(default_factory=list)
    """Those of ``regions`` whose code may run yet."""

    def all_harmless(self) -> bool:
        return all(region.is_harmless for region in self.regions)

    def counted(self) -> Iterator[CountedLoop]:
        return (region for region in self.regions if isinstance(region, CountedLoop))

    def close(self) -> None:
        """The frame is converted."""
        for region in self.regions:
            region.forget()

    def begins(self) -> None:
        self._open.clear()
        self.close()
        self.regions.clear()

    def length_of(self, frame: Any, iterated: fx.Node) -> int | None:
        """How many iterations to trace of a loop over ``iterated``, or None to leave it to Dynamo."""
        hits = _nonzero_of_a_vector(iterated) if Loops.EXPERTS in self.kinds else None
        head = dynamo_frames.loop_about_to_start(frame)
        if hits is None or head is None:
            return None
        loop = bytecode.loop_at(frame.instructions, head)
        span = bytecode.Span(head + 1, loop.end, head)
        if bytecode.left_behind(frame.instructions, loop, span) != frozenset():
            return None
        is_shortened = _name(frame, loop) in self.shortened
        length = int(value_of(hits.args[0]).shape[0]) - is_shortened  # type: ignore[arg-type]
        region = UnrolledLoop(frame, loop, span, length=length, is_shortened=is_shortened)
        hits.meta[HITS] = region
        self._add(region)
        return length

    def steps_of(self, frame: Any, count: Any) -> int | None:
        loop = counted_loop(frame, count) if Loops.COUNTED in self.kinds and not self._running() else None
        if loop is None:
            return None
        self._add(loop)
        return TRACED

    def decide(self, frame: Any, at: int | None, node: fx.Node, expression: Any) -> bool | None:
        """The value of a condition that tells no rows from some rows, when there are some; None for any other."""
        if at is None or Loops.EXPERTS not in self.kinds:
            return None
        instructions = frame.instructions
        condition = row_condition(node, expression)
        loop = bytecode.enclosing_loop(instructions, at) if condition is not None else None
        if condition is None or loop is None:
            return None
        span = bytecode.skipped_by(instructions, at, condition.if_empty, loop)
        names = bytecode.left_behind(instructions, loop, span) if span is not None else None
        if span is None or names is None:
            return None
        if not all(bytecode.is_carried_within(instructions, loop, span, name) for name in names):
            return None
        held = {name: dynamo_frames.local_value(frame, name) for name in names}
        carried = {name: [value] for name, value in held.items()}
        before = self._add(NonEmptyBranch(frame, loop, span, condition=condition, carried=carried))
        for region in before:
            if isinstance(region, NonEmptyBranch):
                for name, value in held.items():
                    region.carried[name].append(value)
        return not condition.if_empty

    def _add(self, region: SpeculativeRegion) -> list[SpeculativeRegion]:
        """Returns the one of the iteration before, which is over."""
        over = [each for each in self._open if each.frame is region.frame and each.span == region.span]
        for each in over:
            each.is_over = True
            self._open.remove(each)
        self._open.append(region)
        self.regions.append(region)
        return over

    def is_watching(self, frame: Any, at: int) -> bool:
        return bool(self._open) and (bool(self._touched_by(frame, at)) or any(self._loops_at(frame, at)))

    def stepped(self, step: dynamo_tracing.TracedInstruction) -> None:
        for loop in list(self._loops_at(step.frame, step.at)):
            loop.next_step() if step.at == loop.loop.head else loop.stepped(step)
            if loop.is_over:
                self._open.remove(loop)
        for region in self._touched_by(step.frame, step.at):
            if region.harm is None:
                region.harm = self._harm(region, step)

    def _harm(self, region: SpeculativeRegion, step: dynamo_tracing.TracedInstruction) -> str | None:
        if not step.goes_on and (step.frame is region.frame or not step.instruction.opname.startswith("RETURN")):
            return "the graph ends inside of it"
        grown = _growth(region, step)
        if grown is not None and isinstance(region, NonEmptyBranch):
            region.grown[grown.name] = grown
            return None
        return harmless.harm(step, region.made)

    def _touched_by(self, frame: Any, at: int) -> list[SpeculativeRegion]:
        """The regions that the instruction at ``at`` of ``frame`` is in, or of a function that they call."""
        return [r for r in self._open if (r.holds(at) if r.frame is frame else r.is_running())]

    def _loops_at(self, frame: Any, at: int) -> Iterator[CountedLoop]:
        """Those that take their next number there, or use it."""
        loops = (region for region in self._open if isinstance(region, CountedLoop) and region.frame is frame)
        return (each for each in loops if at == each.loop.head or at in each.indexes)

    def created(self, token: Any) -> None:
        for region in self._running():
            region.created.append(token)

    def made(self, node: fx.Node, frame: Any, bodies_of: Sequence[Any], misuses_index: bool) -> None:
        if not is_call(node):  # an input that the code is the first to read is no part of it
            return
        if node.target in _CAT:
            self._note_joined(node)
        running = self._running()
        if running:
            node.meta[REGIONS] = tuple(running)
        for region in running:
            region.nodes += 1
            if isinstance(region, CountedLoop):
                node.meta[STEP] = region.step
            if isinstance(region, UnrolledLoop):
                if _indexes_past_the_end(node, region.length - 1):
                    self.overran.add(_name(region.frame, region.loop))
                if misuses_index:
                    region.harm = region.harm or "its code uses the number of an expert otherwise than as an index"

    def _note_joined(self, node: fx.Node) -> None:
        for region in self.regions:
            at = dynamo_frames.instruction_index(region.frame)
            if at is None or not isinstance(region, NonEmptyBranch) or not dynamo_frames.is_tracing(region.frame):
                continue
            if any(at in growth.calls for growth in region.grown.values()):
                region.joined[at] = node

    def _running(self) -> list[SpeculativeRegion]:
        return [region for region in self._open if region.is_running()]


def _name(frame: Any, loop: bytecode.Loop) -> tuple[CodeType, int]:
    return frame.f_code, loop.head


def _growth(region: SpeculativeRegion, step: dynamo_tracing.TracedInstruction) -> Growth | None:
    """The list that the region is about to append to, if that is all that the loop does to it."""
    outer = next((each for each in map(harmless_values.appended_list, step.pushed) if each is not None), None)
    if outer is None or not isinstance(region, NonEmptyBranch) or step.frame is not region.frame or region.made(outer):
        return None
    growth = list_growth.growth_of(region.frame.instructions, region.loop, region.span, step.at)
    if growth is None or growth.name in region.grown or not dynamo_frames.is_list_in(region.frame, growth.name, outer):
        return None
    return growth


def _indexes_past_the_end(node: fx.Node, index: int) -> bool:
    if getattr(node.target, "__name__", "") != "getitem" or node.args[1] not in (index, known_index.known_index(index)):
        return False
    value = value_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    return (
        isinstance(value, torch.Tensor) and value.dim() > 0 and type(value.shape[0]) is int and value.shape[0] == index
    )


def _nonzero_of_a_vector(node: fx.Node) -> fx.Node | None:
    """The node behind ``hit.nonzero()`` and ``hit.nonzero()[:]``, if ``hit`` tells which sums are greater than zero.

    Other vectors may be long, and nothing would be proved of a loop over their positions.
    """
    while getattr(node.target, "__name__", "") == "getitem" and node.args[1] == slice(None):
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in (torch.nonzero, "nonzero") or len(node.args) != 1 or node.kwargs.get("as_tuple", False):
        return None
    value = value_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or not isinstance(value.shape[0], int):
        return None
    return node if counted_sum(node) is not None and value.shape[0] <= MOST_EXPERTS else None
