"""Lets Dynamo trace a loop over the experts that are hit, ``for e in hit.nonzero(): ...``, as a loop over all of them.

That is another program unless the body does nothing for an expert that is not hit. The body's Python code decides one
half, here: an iteration must leave nothing behind but tensors. The other half is in the graph, and proved by
``group_experts``, which marks the loops that it has proved; a frame with any other loop is converted again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.fx.values import value_of

LOOP = "glue_unrolled_loop"
"""Key in ``node.meta``: the UnrolledLoop whose body the node was traced in."""
HITS = "glue_unrolled_hits"
"""Key in ``node.meta`` of the nonzero that the loop iterates over."""


@dataclass(eq=False)
class UnrolledLoop:
    """A loop over the nonzero positions of a vector of ``length``, traced as one over all its positions."""

    length: int
    frame: Any
    """The Dynamo translator that runs the loop."""
    head: int
    end: int
    """Indices of the loop's FOR_ITER and of the instruction after the loop."""
    proved: bool = False
    leaves_a_trace: bool = False
    """The body changed a Python object."""

    def is_running(self) -> bool:
        at = compat.instruction_index(self.frame)
        return at is not None and self.head < at < self.end


@dataclass
class UnrolledLoops:
    """The loops of the frame that is being converted."""

    loops: list[UnrolledLoop] = field(default_factory=list)
    _output: Any = None

    def all_proved(self) -> bool:
        return all(loop.proved and not loop.leaves_a_trace for loop in self.loops)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        with compat.traced_iteration(self._length, self._mutated, self._made):
            yield

    def _length(self, frame: Any, iterated: fx.Node) -> int | None:
        """How many iterations to trace of a loop over ``iterated``, or None to leave it to Dynamo."""
        if frame.output is not self._output:  # Dynamo starts again after a failed speculation
            self._output = frame.output
            self.loops.clear()
        hits = _nonzero_of_a_vector(iterated)
        head = compat.loop_about_to_start(frame)
        if hits is None or head is None:
            return None
        end = independent_iterations(frame.instructions, head)
        if end is None:
            return None
        length = int(value_of(hits.args[0]).shape[0])  # type: ignore[arg-type]
        loop = UnrolledLoop(length, frame, head, end)
        hits.meta[HITS] = loop
        self.loops.append(loop)
        return length

    def _mutated(self) -> None:
        for loop in self._running():
            loop.leaves_a_trace = True

    def _made(self, node: fx.Node) -> None:
        if node.op.startswith("call_"):  # an input that the body is the first to read is no part of it
            for loop in self._running():
                node.meta[LOOP] = loop

    def _running(self) -> list[UnrolledLoop]:
        return [loop for loop in self.loops if loop.is_running()]


def _nonzero_of_a_vector(node: fx.Node) -> fx.Node | None:
    """The node behind ``hit.nonzero()`` and ``hit.nonzero()[:]``, if ``hit`` has one dimension of known size."""
    while getattr(node.target, "__name__", "") == "getitem" and node.args[1] == slice(None):
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in (torch.nonzero, "nonzero") or len(node.args) != 1 or node.kwargs:
        return None
    value = value_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or not isinstance(value.shape[0], int):
        return None
    return node


def independent_iterations(instructions: Sequence[Any], head: int) -> int | None:
    """Index after the loop at ``head``, if no iteration can leave anything to a later one or to the code behind it.

    Reads the bytecode: the body stores to local names alone, each time before it reads them and never under a
    condition, nothing outside of the body reads those names, and the only way out is the loop's own end.
    """
    position = {id(instruction): i for i, instruction in enumerate(instructions)}
    end = position[id(instructions[head].target)]
    body = range(head + 1, end)
    stored: set[str] = set()
    stored_at: list[int] = []
    for i in body:
        reads, writes = _local_names(instructions[i])
        # Reading first: no instruction reads what it stores itself, but the pairs of 3.13 store first.
        stored.update(writes)
        if writes:
            stored_at.append(i)
        if instructions[i].opname.startswith(_LEAVES_A_TRACE) and not instructions[i].opname.startswith("STORE_FAST"):
            return None
        if any(name not in stored and _is_stored_in(instructions, body, name) for name in reads):
            return None
    last = end - 1
    for i in body:
        target = instructions[i].target
        if target is None:
            continue
        to = position[id(target)]
        if not head <= to < end:
            return None
        # Jumping to the end of the iteration skips nothing that this iteration still reads.
        if i < to < last and any(i < at < to for at in stored_at):
            return None
    outside = [i for i in range(len(instructions)) if i not in body]
    if any(_local_names(instructions[i])[0] & stored for i in outside):
        return None
    return end


_LEAVES_A_TRACE = (
    "STORE_",
    "DELETE_",
    "RETURN",
    "YIELD",
    "RAISE",
    "IMPORT",
    "MAKE_FUNCTION",
    "LOAD_CLOSURE",
    "BEFORE_WITH",
    "SETUP_",
    "LOAD_SPECIAL",
)


def _local_names(instruction: Any) -> tuple[set[str], set[str]]:
    """Local names that an instruction reads and writes; the fused instructions of Python 3.13 name two."""
    name, value = instruction.opname, instruction.argval
    names = list(value) if isinstance(value, tuple) else [value]
    if name == "STORE_FAST_LOAD_FAST":
        return {names[1]}, {names[0]}
    if name.startswith("STORE_FAST"):
        return set(), set(names)
    if name.startswith(("LOAD_FAST", "LOAD_CLOSURE", "LOAD_DEREF")):
        return set(names), set()
    return set(), set()


def _is_stored_in(instructions: Sequence[Any], body: range, name: str) -> bool:
    return any(name in _local_names(instructions[i])[1] for i in body)
