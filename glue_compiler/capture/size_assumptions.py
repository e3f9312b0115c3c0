"""Sizes that depend on data, of which Dynamo takes for granted what eager does not.

Lets ``zeros(n.max().item()) + x`` through: Dynamo assumes that both have the same size, and asserts it at run time,
where eager also takes a size of 1. Whether an assertion is eager's own is asked of the operator: it is tried with sizes
for which the assertion is false. One that is Dynamo's alone becomes a guard, where the sizes are a function of one
integer input and the call that is being traced keeps to it. So a call that does not keep to it gets code of its own.
Other frames are converted again without the flags.

An assertion about sizes that are computed from the same numbers, such as those of the pieces that ``cu_seqlens`` is
made of, stays torch's: a guard would read the data in each call, and it only fails for sizes of 0 or 1. If that is the
call that is being traced, the frame is converted again without the flags; a later one raises, and so does the first if
the sizes are no function of one input as it was passed: lengths of no documents at all, of positions that were written
before. Two sizes that are read from other data may be 1 and another at any time: such a frame is always converted
again.

One row that is assigned to a slice whose length depends on data too, ``out[:n] = row``, is left: backward raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from glue_compiler.capture.index_bounds import assert_indices, may_select
from glue_compiler.capture.index_puts import ASSUMES_ROWS, assumed_of, may_write_at_indices
from glue_compiler.capture.input_functions import InputFunction, Limits, input_function
from glue_compiler.capture.size_divisions import divided_by_size, may_divide
from glue_compiler.capture.traced_writes import TracedWrites
from glue_compiler.compat import branch_guards, dynamo_frames, dynamo_tracing, size_assertions, symbols
from glue_compiler.fx.bodies import is_higher_order
from glue_compiler.fx.effects import Kind
from glue_compiler.fx.values import is_call, storages_of, tensors_in, unbacked_in, value_of, values_of

LIMITS = Limits(operators=128, data_dependent=True)


@dataclass
class SizeAssumptions(dynamo_tracing.TracingObserver):
    """The assumptions of one frame that is being traced.

    ``writes``: of the frame, told before this. ``unguarded``: an assumption that no guard can see to, in words.
    """

    writes: TracedWrites
    unguarded: str | None = None
    _seen: list[Any] = field(default_factory=list)
    _nodes: list[fx.Node] = field(default_factory=list)
    """Made since the assertions were looked at."""
    _dependent: list[fx.Node] = field(default_factory=list)
    """Those of them that take what depends on data."""

    def begins(self) -> None:
        self._seen, self.unguarded = [], None
        self._nodes.clear()
        self._dependent.clear()

    def made(self, node: fx.Node, frame: Any, bodies_of: Sequence[Any], misuses_index: bool) -> None:
        """Compiled code raises when the graph runs, or not at all, where eager code goes on in a handler."""
        self._nodes.append(node)
        if is_call(node) and unbacked_in(values_of(node.all_input_nodes)):
            self._dependent.append(node)
            if dynamo_frames.may_catch(frame):
                self.unguarded = f"'{node.name}' takes what depends on data, and its exceptions are caught"

    def breaks(self, frame: Any) -> None:
        """Dynamo by itself breaks where a number is read, and goes on with what Python makes of it. What goes on behind
        this break takes ranges and dictionaries of numbers as inputs, which Dynamo does not guard (2.13)."""
        if any(map(dynamo_frames.depends_on_data, frame.stack)):
            self.unguarded = "a graph break takes what depends on data"

    def looks_into_container(self, frame: Any) -> None:
        if symbols.has_unbacked(frame.output.shape_env) and any(map(dynamo_frames.depends_on_data, frame.stack[-2:])):
            self.unguarded = "what depends on data is looked for in a container, where Dynamo finds constants alone"

    def traced(self, frame: Any) -> None:
        """Not only behind nodes: what an instruction without any asserts is no operator's, and stays torch's."""
        if size_assertions.assertion_count(frame) != len(self._seen):
            made = size_assertions.assertions(frame)
            for assertion in [each for token, each in made if not any(token is known for known in self._seen)]:
                if size_assertions.compares_with_a_known_size(assertion):  # which becomes a guard
                    is_fine = self._eager_raises(frame, assertion) or self._is_kept(frame, assertion)
                else:
                    is_fine = self._is_kept(frame, assertion) or self._eager_raises(frame, assertion)
                if not is_fine:
                    self.unguarded = f"eager does not ask for {assertion} at '{self._nodes[-1].name}'"
            self._seen = [token for token, _ in made]
        for node in self._dependent:
            if may_write_at_indices(node):
                self._written(frame, node)
            if may_select(node):
                self.unguarded = assert_indices(node, self.writes.record_of(node)) or self.unguarded
            if may_divide(node):
                self.unguarded = divided_by_size(node, self.writes.record_of(node)) or self.unguarded
        self._nodes.clear()
        self._dependent.clear()

    def _eager_raises(self, frame: Any, assertion: Any) -> bool:
        return size_assertions.eager_raises(frame, self._nodes, assertion)

    def _written(self, frame: Any, node: fx.Node) -> None:
        """Rows of unknown number that are written to a known one may be those of experts: a pass may prove them."""
        left = [each for each in assumed_of(node, self.writes.record_of(node)) if not self._is_kept(frame, each)]
        if not all(size_assertions.compares_with_a_known_size(each) for each in left):
            self.unguarded = f"eager does not ask for {left[0]} at '{node.name}'"
        elif left:
            node.meta[ASSUMES_ROWS] = True

    def _is_kept(self, frame: Any, assertion: Any) -> bool:
        """Is it guarded, or torch's to check?"""
        check = _check(frame, assertion, self.writes)
        if size_assertions.compares_with_a_known_size(assertion):
            return check is not None and check.holds_now() and check.guard()
        return _is_of_one(frame, assertion, self.writes) and (check is None or check.holds_now())


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
    nodes = list(frame.output.root_tracer.graph.nodes)
    found = {symbol: _definition(nodes, symbol) for symbol in symbols}
    places = [place for place in found.values() if place is not None]
    if len(places) != len(symbols):
        return None
    computed = input_function(frame, [node for node, _ in places], LIMITS, writes)
    if computed is None:
        return None
    function, example = computed
    return _Check(assertion, function, example, symbols, [dim for _, dim in places])


def _is_of_one(frame: Any, assertion: Any, writes: TracedWrites) -> bool:
    """Are both sides of an equation computed from the same numbers, so that they differ for sizes of 0 and 1 alone?"""
    if not isinstance(assertion, sympy.Eq):
        return True
    left, right = (_read_from(frame, size_assertions.unbacked_in_expression(side), writes) for side in assertion.args)
    return left == right


def _read_from(frame: Any, symbols: Iterable[Any], writes: TracedWrites) -> frozenset[Any]:
    """What these sizes are read from. That of a slice may be a symbol of its own, computed from others."""
    found: set[Any] = set()
    for symbol in symbols:
        place = _definition(size_assertions.nodes_so_far(frame), symbol)
        of = [] if place is None else unbacked_in(values_of(place[0].all_input_nodes))
        if place is None:
            found.add(symbol)
        elif of and symbol not in of and not writes.effects_of(place[0]).syncs:
            found |= _read_from(frame, of, writes)
        else:
            found.add((_computation(place[0], writes), place[1]))
    return frozenset(found)


def _computation(node: fx.Node, writes: TracedWrites) -> Any:
    """Equal for nodes that compute the same integers from the same memory; ``node`` if that cannot be said of it."""
    operands = values_of(node.all_input_nodes)
    is_looked_into = is_call(node) and not is_higher_order(node)
    # Floats may be computed in other modes of autocast.
    if not is_looked_into or any(tensor.is_floating_point() for tensor in tensors_in(value_of(node))):
        return node
    if writes.effects_of(node).kind is not Kind.PURE or writes.may_have_written(storages_of(operands)):
        return node

    def described(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _computation(value, writes)
        if isinstance(value, tuple | list):
            return tuple(map(described, value))
        if isinstance(value, dict):
            return tuple((name, described(each)) for name, each in value.items())
        return (type(value), repr(value))

    return (node.op, node.target, described(node.args), described(node.kwargs))


def _definition(nodes: Iterable[fx.Node], symbol: Any) -> tuple[fx.Node, int] | None:
    """The operator that first knows a size, and where in its result."""
    for node in nodes:
        place = size_assertions.place_of(symbol, value_of(node)) if is_call(node) else None
        if place is not None:
            return node, place
    return None
