"""Code that was traced although it does not always run, and what is known of it.

Capture makes regions, ``group_experts`` proves them, and :func:`check_proved` refuses a graph with any other.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.capture import bytecode
from glue_compiler.capture.list_growth import Growth
from glue_compiler.capture.row_conditions import RowCondition
from glue_compiler.compat import dynamo_frames, harmless_values
from glue_compiler.errors import GlueSpeculationError
from glue_compiler.fx import bodies


class Loops(enum.Flag):
    """Kinds of loops that are traced otherwise than they run."""

    NONE = 0
    EXPERTS = enum.auto()
    COUNTED = enum.auto()
    """Of equal steps (``counted_loops.py``)."""


REGIONS = "glue_speculative_regions"
"""Key in ``node.meta``: the speculative regions that the node was traced in."""
HITS = "glue_unrolled_hits"
"""Key in ``node.meta`` of the nonzero that an unrolled loop iterates over."""

# Which loops are tried. What is proved of them later is read from operators, not from names.
_SUM = {torch.sum, "sum"}
_GREATER = {torch.greater, torch.gt, operator.gt, "gt", "greater", "__gt__"}


@dataclass(eq=False)
class SpeculativeRegion:
    """Code that was traced although it does not always run: the instructions of ``span``."""

    frame: Any
    """The Dynamo translator that runs it; None when the frame is converted."""
    loop: bytecode.Loop
    span: bytecode.Span
    proved: bool = False
    """Set by the pass that proved that running it when it would not have run does nothing."""
    harm: str | None = None
    """Why running the code may change what Python holds, or is not what eager code does; None if it is known not to."""
    created: list[Any] = field(default_factory=list)
    """Stand for the Python objects that the code has made."""
    is_over: bool = False
    nodes: int = 0
    """How many operators were traced in it."""

    def is_running(self) -> bool:
        return self.holds(dynamo_frames.instruction_index(self.frame))

    def holds(self, at: int | None) -> bool:
        """Is the instruction at ``at`` of its frame one of the region, which is not over?"""
        return not self.is_over and at is not None and self.span.start <= at < self.span.end

    def made(self, thing: Any) -> bool:
        """Has the code made the object that Dynamo's variable ``thing`` stands for?"""
        token = harmless_values.mutation_token(thing)
        return any(token is own for own in self.created)

    def forget(self) -> None:
        """Lets go of what Dynamo traced with, the values of the call among it: nodes of a compiled graph live on."""
        self.frame = None
        self.created.clear()

    @property
    def is_harmless(self) -> bool:
        return self.proved and self.harm is None


@dataclass(eq=False)
class UnrolledLoop(SpeculativeRegion):
    """A loop over the nonzero positions of a vector, traced as one over its first ``length`` positions."""

    length: int = 0
    is_shortened: bool = False
    """The vector has one position more, which is left out because the body cannot run for it."""


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
        return (self.proved or nothing) and self.harm is None


def check_proved(gm: fx.GraphModule, proved: Iterable[SpeculativeRegion], reasons: Iterable[str]) -> None:
    """Raises GlueSpeculationError if ``gm`` holds code of a region that no pass has proved.

    Args:
        gm: after all passes, so that what they have proved holds.
        proved: the regions that they have proved. reasons: why not others, as passes recorded it.
    """
    for region in proved:
        region.proved = True
    for node in (node for module in bodies.graph_modules(gm) for node in module.graph.nodes):
        regions = (*node.meta.get(REGIONS, ()), *([node.meta[HITS]] if HITS in node.meta else []))
        if not all(region.is_harmless for region in regions):
            raise GlueSpeculationError("; ".join(reasons) or f"'{node.name}' is not proved to do nothing without rows")


def counted_sum(hits: fx.Node) -> fx.Node | None:
    """The sum, for ``(sum > 0).nonzero()``."""
    greater = hits.args[0]
    if not isinstance(greater, fx.Node) or greater.target not in _GREATER or len(greater.args) != 2:
        return None
    total, zero = greater.args
    if type(zero) is not int or zero != 0 or not isinstance(total, fx.Node):
        return None
    return total if total.target in _SUM else None
