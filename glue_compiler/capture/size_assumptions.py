"""Sizes that depend on data, of which Dynamo takes for granted what eager does not.

Lets ``zeros(n.max().item()) + x`` through: Dynamo assumes that both have the same size, and asserts it at run time,
where eager also takes a size of 1. Whether an assertion is eager's own is asked of the operator: it is tried with sizes
for which the assertion is false. One that is Dynamo's alone becomes a guard, where the sizes are a function of one
integer input and the call that is being traced keeps to it. So a call that does not keep to it gets code of its own.
Other frames are converted again without the flags.

Two sizes that were read from data one by one, as in ``ones(n.max().item()) + ones(n.min().item())``, keep torch's
assertion: where they differ eager has no result either, but for a size of 1 or 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from glue_compiler import compat
from glue_compiler.capture.input_functions import Limits, input_function
from glue_compiler.capture.traced_writes import TracedWrites
from glue_compiler.compat import branch_guards, size_assertions
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.fx.values import tensors_in, unbacked_in, value_of

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
                if not _is_of_one_size(frame, assertion):
                    continue
                raises = size_assertions.eager_raises(frame, self._nodes, assertion)
                if not raises and not _guard(frame, assertion, self.writes):
                    self.unguarded = f"eager does not ask for {assertion} at '{self._nodes[-1].name}'"
            self._seen = [token for token, _ in made]
        self._nodes.clear()
        return False


def _is_of_one_size(frame: Any, assertion: Any) -> bool:
    """Is it about one size that depends on data, or an equation of sizes that do with others that do not?

    Torch 2.11 has another symbol for a slice of such a size: an equation of the slice with the whole is about one, too.
    That of two slices is not looked at: ``cu_seqlens[1:] - cu_seqlens[:-1]`` needs no guard.
    """
    symbols = size_assertions.unbacked_in_expression(assertion)
    if len(symbols) == 1:
        return True
    if not size_assertions.is_equation(assertion):
        return False
    known = any(not size_assertions.unbacked_in_expression(side) for side in assertion.args)
    roots = _read_from_data(frame, symbols)
    return known or (len(roots) == 1 and not roots.isdisjoint(symbols))


def _read_from_data(frame: Any, symbols: list[Any]) -> set[Any]:
    """The sizes that depend on data which ``symbols`` follow from."""
    found, seen, waiting = set(), set(), list(symbols)
    while waiting:
        symbol = waiting.pop()
        if symbol in seen:
            continue
        seen.add(symbol)
        place = _definition(frame, symbol)
        operands = [value_of(operand) for operand in place[0].all_input_nodes] if place is not None else []
        given = unbacked_in(operands)
        if place is None or not given or symbol in given or _reads_data(place[0], operands):
            found.add(symbol)
        else:
            waiting += given
    return found


def _reads_data(node: fx.Node, operands: list[Any]) -> bool:
    effects = EffectAnalysis(compat.fake_mode_of(tensors_in([value_of(node), *operands]))).of(None, node)
    return effects.syncs or effects.kind is not Kind.PURE


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
