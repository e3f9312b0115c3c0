"""Sizes that depend on data, of which Dynamo takes for granted what eager does not.

Lets ``zeros(n.max().item()) + x`` through: Dynamo assumes that both have the same size, and asserts it at run time,
where eager also takes a size of 1. Whether an assertion is eager's own is asked of the operator: it is tried with sizes
for which the assertion is false. One that is Dynamo's alone becomes a guard, where the sizes are a function of one
integer input and the call that is being traced keeps to it. So a call that does not keep to it gets code of its own.
Other frames are converted again without the flags.

An assertion about one size that depends on data, such as that of the pieces that ``cu_seqlens`` is made of, stays
torch's: a guard would read the data in each call, and it only fails for a size of 0 or 1. If that is the call that is
being traced, the frame is converted again without the flags; a later one raises. Two sizes of which nothing says that
they are equal may be 1 and another at any time: such a frame is always converted again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from glue_compiler import compat
from glue_compiler.capture.index_puts import assumed_of, may_write_at_indices
from glue_compiler.capture.input_functions import InputFunction, Limits, input_function
from glue_compiler.capture.traced_writes import TracedWrites
from glue_compiler.compat import branch_guards, size_assertions
from glue_compiler.fx.values import tensors_in, value_of

LIMITS = Limits(operators=128, data_dependent=True)


@dataclass
class SizeAssumptions(compat.TracingObserver):
    """The assumptions of one frame that is being traced.

    ``writes``: of the frame, told before this. ``unguarded``: an assumption that no guard can see to, in words.
    """

    writes: TracedWrites
    unguarded: str | None = None
    _output: Any = None
    _seen: list[Any] = field(default_factory=list)
    _nodes: list[fx.Node] = field(default_factory=list)
    """Made since the assertions were looked at."""

    def made(self, node: fx.Node, misuses_index: bool) -> None:
        self._nodes.append(node)

    def is_watching(self, frame: Any, at: int) -> bool:
        if frame.output is not self._output:  # Dynamo starts again after a failed speculation
            self._output, self._seen, self.unguarded = frame.output, [], None
        elif size_assertions.assertion_count(frame) != len(self._seen):
            made = size_assertions.assertions(frame)
            for assertion in [each for token, each in made if not any(token is known for known in self._seen)]:
                if size_assertions.eager_raises(frame, self._nodes, assertion):
                    continue
                self._assumed(frame, assertion)
            self._seen = [token for token, _ in made]
        for node in self._nodes:
            for assumption in _assumed_by_writes(node, self.writes):
                self._assumed(frame, assumption)
        self._nodes.clear()
        return False

    def _assumed(self, frame: Any, assertion: Any) -> None:
        """Have it guarded where that can be, or the frame converted again."""
        check = _check(frame, assertion, self.writes)
        if size_assertions.compares_with_a_known_size(assertion):
            is_kept = check is not None and check.holds_now() and check.guard()
        else:
            is_kept = len(assertion.free_symbols) == 1 and (check is None or check.holds_now())
        if not is_kept:
            self.unguarded = f"eager does not ask for {assertion} at '{self._nodes[-1].name}'"


def _assumed_by_writes(node: fx.Node, writes: TracedWrites) -> Iterator[Any]:
    operands = [value_of(arg) for arg in node.all_input_nodes]
    if node.op.startswith("call_") and may_write_at_indices(operands):
        record = writes.record_of(node)
        if record is not None:
            yield from assumed_of(record, tensors_in(operands))


@dataclass(frozen=True)
class _Check:
    """An assertion as a function of one integer input, whose value in this call is ``example``."""

    assertion: Any
    function: InputFunction
    example: Any
    symbols: list[Any]
    dims: list[int]

    def holds(self, values: tuple[Any, ...]) -> bool:
        sizes = [value if dim < 0 else value.shape[dim] for value, dim in zip(values, self.dims, strict=True)]
        return size_assertions.holds(self.assertion, dict(zip(self.symbols, sizes, strict=True)))

    def holds_now(self) -> bool:
        return self.holds(self.function.values(self.example))

    def guard(self) -> bool:
        """Calls for which it does not hold get code of their own from now on."""
        if self.function.source is not None:
            # The guard keeps no example, which is a tensor of the call.
            check = dataclasses.replace(self, example=None)
            text = f"glue: of sizes that depend on {self.function.source.name}, {self.assertion}"
            branch_guards.install_guard(self.function.source, self.function.guard(check.holds), text)
        return True


def _check(frame: Any, assertion: Any, writes: TracedWrites) -> _Check | None:
    symbols = size_assertions.unbacked_in_expression(assertion)
    if set(symbols) != set(assertion.free_symbols):
        return None
    found = {symbol: _definition(frame, symbol) for symbol in symbols}
    places = [place for place in found.values() if place is not None]
    if len(places) != len(symbols):
        return None
    computed = input_function(frame, [node for node, _ in places], LIMITS, writes)
    if computed is None:
        return None
    function, example = computed
    return _Check(assertion, function, example, symbols, [dim for _, dim in places])


def _definition(frame: Any, symbol: Any) -> tuple[fx.Node, int] | None:
    """The operator that first knows a size, and where in its result."""
    for node in frame.output.root_tracer.graph.nodes:
        place = size_assertions.place_of(symbol, value_of(node)) if node.op.startswith("call_") else None
        if place is not None:
            return node, place
    return None
