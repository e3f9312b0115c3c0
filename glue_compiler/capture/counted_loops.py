"""Loops over a ``range`` whose steps take their turn as an index of tensors alone: two steps are traced, of many.

``for i in range(chunks): state = f(state, x[:, i]); out[:, i] = state`` is one graph for each number of chunks, which
grows with it. What step 1 does is what all steps after it do, if Python cannot tell them apart: the number of a step is
only an item of an index of a tensor, the code leaves nothing behind but tensors (``harmless.py``), and what local names
hold after two steps repeats. ``roll_loops`` proves the rest from the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.capture import bytecode, list_growth
from glue_compiler.capture.regions import SpeculativeRegion
from glue_compiler.compat import dynamo_frames, dynamo_tracing, harmless_values
from glue_compiler.compat.symbols import size_when_traced

LEAST_STEPS = 8
"""Where the number is fixed: fewer are worth their nodes, which compilers fuse."""
TRACED = 2

STEP = "glue_loop_step"
"""Key in ``node.meta``: the number of the step that the node was traced in."""
HELD = "glue_loop_held"
"""Key in ``node.meta``: what held the node when steps began, as ``(loop, step, name)``; step 2 is what follows."""


@dataclass(eq=False)
class CountedLoop(SpeculativeRegion):
    """A loop over ``range(count)``, of which two steps are traced.

    ``count``: an int, or the size. ``names``: local names that steps store, and later code reads. ``indexes``: the
    instructions that index with the number of a step.
    """

    count: int | torch.SymInt = 0
    names: frozenset[str] = frozenset()
    indexes: frozenset[int] = frozenset()
    step: int = -1
    """The one that is being traced."""
    _numbers: dict[str, Any] = field(default_factory=dict)

    def next_step(self) -> None:
        """Called when the loop has taken the next number, or has none left."""
        self.step += 1
        for name in self.names:
            held = dynamo_frames.local_value(self.frame, name)
            if isinstance(held, fx.Node):
                held.meta[HELD] = (*held.meta.get(HELD, ()), (self, self.step, name))
            elif self.step and (held is None or held != self._numbers.get(name)):
                self.harm = self.harm or f"'{name}' holds another Python value after each step"
            else:
                self._numbers[name] = held
        self.is_over = self.step == TRACED

    def stepped(self, step: dynamo_tracing.TracedInstruction) -> None:
        """One of ``indexes`` was traced."""
        indexed = step.taken(0)[1] if step.instruction.opname == "STORE_SUBSCR" else step.taken(1)[0]
        if not harmless_values.is_tensor(indexed):
            self.harm = self.harm or "its code looks the number of a step up in what is no tensor"


def counted_loop(frame: Any, count: int | torch.SymInt) -> CountedLoop | None:
    """The loop that is about to begin, if ``range(count)`` was called for it and two of its steps may tell of all."""
    steps = size_when_traced(count)
    least = LEAST_STEPS if isinstance(count, int) else TRACED
    at = dynamo_frames.instruction_index(frame)
    if steps is None or steps < least or at is None:
        return None
    code = frame.instructions
    following = [each.opname for each in code[at + 1 : at + 4]]
    if following != ["GET_ITER", "FOR_ITER", "STORE_FAST"]:
        return None
    loop = bytecode.loop_at(code, at + 2)
    span = bytecode.Span(loop.head + 1, loop.end, loop.head)
    names = bytecode.left_behind(code, loop, span)
    indexes = _only_indexes(code, span, code[loop.head + 1].argval)
    if names is None or not indexes:
        return None
    return CountedLoop(frame, loop, span, count=count, names=names, indexes=frozenset(indexes))


def _only_indexes(code: bytecode.Instructions, span: bytecode.Span, name: str) -> set[int]:
    """Where ``name`` is one of several indices, ``x[:, name]``; empty if it is read otherwise, or a loop is inside.

    Lists and modules take no tuple as an index.
    """
    found = set()
    for i in range(span.start + 1, span.end):
        instruction = code[i]
        if instruction.opname == "FOR_ITER":
            return set()
        named = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if name not in named or "FAST" not in instruction.opname:
            continue
        built = list_growth.taken_at(code, i)
        if len(named) > 1 or not instruction.opname.startswith("LOAD_FAST") or built is None:
            return set()
        if code[built].opname != "BUILD_TUPLE" or not _is_subscript(code[built + 1]):
            return set()
        found.add(built + 1)
    return found


def _is_subscript(instruction: Any) -> bool:
    """Is it ``x[i]`` or ``x[i] = y``? 3.14 has the first as a binary operator."""
    name = instruction.opname
    return name in ("BINARY_SUBSCR", "STORE_SUBSCR") or (name == "BINARY_OP" and instruction.arg == 26)
