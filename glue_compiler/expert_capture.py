"""Lets Dynamo trace what a loop over experts does for experts without rows, where it would have to look at the data.

``for e in hit.nonzero(): ...`` is traced as a loop over all experts, and ``if rows.numel() == 0: continue`` as if there
were rows. That is another program unless the code does nothing for an expert without rows. The Python code decides one
half, here: it must leave nothing behind but tensors. The other half is in the graph, and proved by ``group_experts``,
which marks the regions that it has proved; a frame with any other region is converted again.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import fx

from glue_compiler import bytecode, compat, list_growth
from glue_compiler.errors import GlueSpeculationError
from glue_compiler.fx import bodies
from glue_compiler.fx.spellings import CAT, SUM
from glue_compiler.fx.values import value_of
from glue_compiler.list_growth import Growth
from glue_compiler.row_conditions import RowCondition, row_condition

REGIONS = "glue_speculative_regions"
"""Key in ``node.meta``: the speculative regions that the node was traced in."""
HITS = "glue_unrolled_hits"
"""Key in ``node.meta`` of the nonzero that an unrolled loop iterates over."""


MOST_EXPERTS = 2048
"""Loops over more are left to Dynamo: each iteration is traced."""

_GREATER = {torch.greater, torch.gt, operator.gt, "gt", "greater", "__gt__"}


@dataclass(eq=False)
class SpeculativeRegion:
    """Code that was traced although it does not always run: the instructions of ``span``."""

    frame: Any
    """The Dynamo translator that runs it."""
    loop: bytecode.Loop
    span: bytecode.Span
    proved: bool = False
    """Set by the pass that proved that running it when it would not have run does nothing."""
    leaves_a_trace: bool = False
    """The code changed a Python object that it had not made."""
    created: list[Any] = field(default_factory=list)
    """Stand for the Python objects that the code has made."""
    is_over: bool = False
    nodes: int = 0
    """How many operators were traced in it."""

    def is_running(self) -> bool:
        at = compat.instruction_index(self.frame)
        return not self.is_over and at is not None and self.span.start <= at < self.span.end

    @property
    def is_harmless(self) -> bool:
        return (self.proved or not self.nodes) and not self.leaves_a_trace


@dataclass(eq=False)
class UnrolledLoop(SpeculativeRegion):
    """A loop over the nonzero positions of a vector, traced as one over its first ``length`` positions."""

    length: int = 0
    overran: bool = False
    """The body for the last position indexes past the end of a tensor."""
    is_shortened: bool = False
    """The vector has one position more, which is left out because the body cannot run for it."""

    @property
    def is_harmless(self) -> bool:
        return self.proved and not self.leaves_a_trace


@dataclass(eq=False)
class NonEmptyBranch(SpeculativeRegion):
    """What a branch skips if there are no rows."""

    condition: RowCondition | None = None
    carried: dict[str, list[Any]] = field(default_factory=dict)
    """Local names that later iterations read → the ints, sympy expressions or nodes that they held before
    the code, and after it."""
    grown: dict[str, Growth] = field(default_factory=dict)
    """Lists that the code appends one item to; whatever else their items do is that they are joined in one call."""
    joined: dict[int, fx.Node] = field(default_factory=dict)
    """Instruction that takes a whole list → the ``cat`` that it traced."""

    @property
    def is_harmless(self) -> bool:
        nothing = not (self.nodes or self.carried or self.grown)
        return (self.proved or nothing) and not self.leaves_a_trace


@dataclass
class SpeculativeRegions:
    """The regions of the frame that is being converted.

    ``shortened``: loops whose last position is left out, by code object and position in it.
    """

    shortened: frozenset[tuple[CodeType, int]] = frozenset()
    regions: list[SpeculativeRegion] = field(default_factory=list)
    _output: Any = None
    _code: CodeType | None = None

    def all_harmless(self) -> bool:
        return all(region.is_harmless for region in self.regions)

    def overran(self) -> frozenset[tuple[CodeType, int]]:
        """The loops whose body cannot run for the last position, named as in ``shortened``."""
        loops = [region for region in self.regions if isinstance(region, UnrolledLoop) and region.overran]
        return frozenset(_name(loop.frame, loop.loop) for loop in loops)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        with compat.traced_iteration(self._length, self._decide, self._created, self._mutated, self._made):
            yield

    def _length(self, frame: Any, iterated: fx.Node) -> int | None:
        """How many iterations to trace of a loop over ``iterated``, or None to leave it to Dynamo."""
        if not self._is_ours(frame):
            return None
        hits = _nonzero_of_a_vector(iterated)
        head = compat.loop_about_to_start(frame)
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
        self.regions.append(region)
        return length

    def _decide(self, frame: Any, at: int, node: fx.Node, expression: Any) -> bool | None:
        """The value of a condition that tells no rows from some rows, when there are some; None for any other."""
        if not self._is_ours(frame):
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
        held = {name: compat.local_value(frame, name) for name in names}
        for region in self.regions:
            same = isinstance(region, NonEmptyBranch) and region.frame is frame and region.span == span
            if same and not region.is_over:  # that was the iteration before
                region.is_over = True
                for name, value in held.items():
                    region.carried[name].append(value)  # type: ignore[attr-defined]
        carried = {name: [value] for name, value in held.items()}
        self.regions.append(NonEmptyBranch(frame, loop, span, condition=condition, carried=carried))
        return not condition.if_empty

    def _is_ours(self, frame: Any) -> bool:
        """Not so of a frame that is converted while this one is compiled."""
        if frame.output is not self._output:
            code = compat.converted_code(frame)
            if self._code not in (None, code):
                return False
            self._output, self._code = frame.output, code
            self.regions.clear()  # Dynamo starts again after a failed speculation
        return True

    def _created(self, thing: Any) -> None:
        for region in self._running():
            region.created.append(thing)

    def _mutated(self, thing: Any, variable: Any) -> None:
        for region in self._running():
            # What an iteration has made and nothing outside of it reads, it may change.
            if any(thing is own for own in region.created):
                continue
            growth = _growth(region, variable)
            if growth is None:
                region.leaves_a_trace = True
            elif isinstance(region, NonEmptyBranch):
                region.grown[growth.name] = growth

    def _made(self, node: fx.Node) -> None:
        if not node.op.startswith("call_"):  # an input that the code is the first to read is no part of it
            return
        if node.target in CAT:
            self._note_joined(node)
        running = self._running()
        if running:
            node.meta[REGIONS] = tuple(running)
        for region in running:
            region.nodes += 1
            if isinstance(region, UnrolledLoop):
                region.leaves_a_trace |= _mixes_known_index(node)
                region.overran |= _indexes_past_the_end(node, region.length - 1)

    def _note_joined(self, node: fx.Node) -> None:
        for region in self.regions:
            at = compat.instruction_index(region.frame)
            if at is None or not isinstance(region, NonEmptyBranch) or not compat.is_tracing(region.frame):
                continue
            if any(at in growth.calls for growth in region.grown.values()):
                region.joined[at] = node

    def _running(self) -> list[SpeculativeRegion]:
        return [region for region in self.regions if region.is_running()]


def check_proved(gm: fx.GraphModule, reasons: Iterable[str]) -> None:
    """Raises GlueSpeculationError if ``gm`` holds code of a region that no pass has proved.

    Args:
        reasons: why not, as passes recorded it.
    """
    for node in (node for module in bodies.graph_modules(gm) for node in module.graph.nodes):
        regions = (*node.meta.get(REGIONS, ()), *([node.meta[HITS]] if HITS in node.meta else []))
        if not all(region.is_harmless for region in regions):
            raise GlueSpeculationError("; ".join(reasons) or f"'{node.name}' is not proved to do nothing without rows")


def _name(frame: Any, loop: bytecode.Loop) -> tuple[CodeType, int]:
    return frame.f_code, loop.head


def _growth(region: SpeculativeRegion, variable: Any) -> Growth | None:
    """The list that the region appends to right now, if that is all that it does to ``variable``."""
    at = compat.instruction_index(region.frame)
    if not isinstance(region, NonEmptyBranch) or at is None or not compat.is_tracing(region.frame):
        return None
    growth = list_growth.growth_of(region.frame.instructions, region.span, at)
    if growth is None or growth.name in region.grown or not compat.is_list_in(region.frame, growth.name, variable):
        return None
    return growth


def _mixes_known_index(node: fx.Node) -> bool:
    """``x[rows, e]`` with ``e`` from a loop over hits: there the slice that stands for it is not the same."""
    index = node.args[1] if getattr(node.target, "__name__", "") == "getitem" else None
    return isinstance(index, tuple) and any(
        isinstance(item, slice) and type(item.start) is int and item == compat.known_index(item.start) for item in index
    )


def _indexes_past_the_end(node: fx.Node, index: int) -> bool:
    if getattr(node.target, "__name__", "") != "getitem" or node.args[1] not in (index, compat.known_index(index)):
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


def counted_sum(hits: fx.Node) -> fx.Node | None:
    """The sum, for ``(sum > 0).nonzero()``."""
    greater = hits.args[0]
    if not isinstance(greater, fx.Node) or greater.target not in _GREATER or len(greater.args) != 2:
        return None
    total, zero = greater.args
    if type(zero) is not int or zero != 0 or not isinstance(total, fx.Node):
        return None
    return total if total.target in SUM else None
