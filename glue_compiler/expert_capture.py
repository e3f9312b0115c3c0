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

import sympy
import torch
from torch import fx

from glue_compiler import bytecode, compat
from glue_compiler.errors import GlueSpeculationError
from glue_compiler.fx import bodies
from glue_compiler.fx.spellings import SUM
from glue_compiler.fx.values import value_of

REGIONS = "glue_speculative_regions"
"""Key in ``node.meta``: the speculative regions that the node was traced in."""
HITS = "glue_unrolled_hits"
"""Key in ``node.meta`` of the nonzero that an unrolled loop iterates over."""


MOST_EXPERTS = 2048
"""Loops over more are left to Dynamo: each iteration is traced."""

_GREATER = {torch.greater, torch.gt, operator.gt, "gt", "greater", "__gt__"}


@dataclass(eq=False)
class SpeculativeRegion:
    """Code that was traced although it does not always run, from instruction ``start`` to the end of an iteration."""

    frame: Any
    """The Dynamo translator that runs it."""
    loop: bytecode.Loop
    start: int
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
        return not self.is_over and at is not None and self.start <= at < self.loop.end

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
    """What is left of an iteration after a branch that goes to the next one if ``count`` is zero."""

    count: Any = None
    """The sympy symbol of the number of rows that was taken to be positive."""


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
        if not bytecode.leaves_nothing_behind(frame.instructions, loop, head + 1):
            return None
        is_shortened = _name(frame, loop) in self.shortened
        length = int(value_of(hits.args[0]).shape[0]) - is_shortened  # type: ignore[arg-type]
        region = UnrolledLoop(frame, loop, head + 1, length=length, is_shortened=is_shortened)
        hits.meta[HITS] = region
        self.regions.append(region)
        return length

    def _decide(self, frame: Any, condition: Any) -> bool | None:
        """The value of a condition that tells no rows from some rows, when there are some; None for any other."""
        if not self._is_ours(frame):
            return None
        count = _tells_zero(condition)
        at = compat.instruction_index(frame)
        loop = bytecode.enclosing_loop(frame.instructions, at) if count is not None and at is not None else None
        if count is None or at is None or loop is None:
            return None
        if_empty = bool(condition.subs(count, 0))
        if not bytecode.goes_to_the_next_iteration(frame.instructions, at, if_empty, loop):
            return None
        if not bytecode.leaves_nothing_behind(frame.instructions, loop, at + 1):
            return None
        for region in self.regions:
            if isinstance(region, NonEmptyBranch) and region.frame is frame and region.start == at + 1:
                region.is_over = True  # that was another iteration
        self.regions.append(NonEmptyBranch(frame, loop, at + 1, count=count))
        return not if_empty

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

    def _mutated(self, thing: Any) -> None:
        for region in self._running():
            # What an iteration has made and nothing outside of it reads, it may change.
            if not any(thing is own for own in region.created):
                region.leaves_a_trace = True

    def _made(self, node: fx.Node) -> None:
        if not node.op.startswith("call_"):  # an input that the code is the first to read is no part of it
            return
        running = self._running()
        if running:
            node.meta[REGIONS] = tuple(running)
        for region in running:
            region.nodes += 1
            if isinstance(region, UnrolledLoop):
                region.leaves_a_trace |= _mixes_known_index(node)
                region.overran |= _indexes_past_the_end(node, region.length - 1)

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


def _tells_zero(condition: Any) -> Any | None:
    """The unbacked symbol, if ``condition`` only asks whether it, a size, is zero."""
    symbols = list(getattr(condition, "free_symbols", ()))
    if len(symbols) != 1 or not compat.unbacked_symbols(condition):
        return None
    symbol = symbols[0]
    zero, one = sympy.S.Zero, sympy.S.One
    asked = {sympy.Eq(symbol, zero), sympy.Ne(symbol, zero), symbol > zero, symbol <= zero, symbol >= one, symbol < one}
    return symbol if condition in asked or getattr(condition, "reversed", None) in asked else None


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
