"""Sizes that depend on data, of which Dynamo takes for granted what eager does not.

Lets ``zeros(n.max().item()) + x`` through: Dynamo assumes that both have the same size, and asserts it at run time,
where eager also takes a size of 1. Whether an assertion is eager's own is asked of the operator: it is tried with sizes
for which the assertion is false. One that is Dynamo's alone becomes a guard, where the sizes are a function of one
integer input and the call that is being traced keeps to it. So a call that does not keep to it gets code of its own.
Other frames are converted again without the flags.

Two sizes that both depend on data, such as those of the pieces that ``cu_seqlens`` is made of, keep torch's assertion:
a guard would read the data in each call, and where they differ eager has no result either, but for a size of 1 or 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from glue_compiler import compat
from glue_compiler.capture.input_functions import Limits, input_function
from glue_compiler.capture.traced_writes import TracedWrites
from glue_compiler.compat import branch_guards, size_assertions
from glue_compiler.fx.values import value_of

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
                if not size_assertions.compares_with_a_known_size(assertion):
                    continue
                raises = size_assertions.eager_raises(frame, self._nodes, assertion)
                if not raises and not _guard(frame, assertion, self.writes):
                    self.unguarded = f"eager does not ask for {assertion} at '{self._nodes[-1].name}'"
            self._seen = [token for token, _ in made]
        self._nodes.clear()
        return False


def _guard(frame: Any, assertion: Any, writes: TracedWrites) -> bool:
    """Calls for which the assertion does not hold get code of their own from now on, if that is possible."""
    symbols = size_assertions.unbacked_in_expression(assertion)
    if set(symbols) != set(assertion.free_symbols):
        return False
    found = {symbol: _definition(frame, symbol) for symbol in symbols}
    places = [place for place in found.values() if place is not None]
    if len(places) != len(symbols):
        return False
    computed = input_function(frame, [node for node, _ in places], LIMITS, writes)
    if computed is None:
        return False
    function, example = computed

    dims = [dim for _, dim in places]

    def check(values: tuple[Any, ...]) -> bool:
        sizes = [value if dim < 0 else value.shape[dim] for value, dim in zip(values, dims, strict=True)]
        return size_assertions.holds(assertion, dict(zip(symbols, sizes, strict=True)))

    if not check(function.values(example)):
        return False
    if function.source is not None:
        text = f"glue: of sizes that depend on {function.source.name}, {assertion}"
        branch_guards.install_guard(function.source, function.guard(check), text)
    return True


def _definition(frame: Any, symbol: Any) -> tuple[fx.Node, int] | None:
    """The operator that first knows a size, and where in its result."""
    for node in frame.output.root_tracer.graph.nodes:
        place = size_assertions.place_of(symbol, value_of(node)) if node.op.startswith("call_") else None
        if place is not None:
            return node, place
    return None
