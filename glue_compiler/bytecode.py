"""Reads the bytecode that Dynamo translates: what code of a loop leaves behind, and where a branch goes.

Instructions are Dynamo's: ``opname``, ``argval`` and ``target``, the instruction that it may jump to, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Instructions = Sequence[Any]


@dataclass(frozen=True)
class Loop:
    """Indices of a loop's FOR_ITER and of the instruction after the loop."""

    head: int
    end: int


def loop_at(instructions: Instructions, head: int) -> Loop:
    """The loop whose FOR_ITER is at ``head``."""
    return Loop(head, _position(instructions)[id(instructions[head].target)])


def enclosing_loop(instructions: Instructions, at: int) -> Loop | None:
    """The innermost ``for`` loop whose body holds the instruction at ``at``."""
    for head in range(at - 1, -1, -1):
        if instructions[head].opname == "FOR_ITER" and at < (loop := loop_at(instructions, head)).end:
            return loop
    return None


def goes_to_the_next_iteration(instructions: Instructions, at: int, condition: bool, loop: Loop) -> bool:
    """Does the conditional jump at ``at`` lead straight to the next iteration when the condition is ``condition``?"""
    name = instructions[at].opname
    if not name.startswith("POP_JUMP") or not name.endswith(("IF_TRUE", "IF_FALSE")):
        return False
    position = _position(instructions)
    at = position[id(instructions[at].target)] if condition == name.endswith("IF_TRUE") else at + 1
    while loop.head < at < loop.end:
        instruction = instructions[at]
        if instruction.opname.startswith("JUMP_") and "_IF_" not in instruction.opname:
            at = position[id(instruction.target)]
        elif instruction.opname in ("NOP", "NOT_TAKEN"):
            at += 1
        else:
            return False
    return at == loop.head


def leaves_nothing_behind(instructions: Instructions, loop: Loop, start: int) -> bool:
    """Is what the code from ``start`` to the end of an iteration does lost when the iteration ends?

    It stores to local names alone, each on every way before it reads it, nothing else reads those names, and the only
    way out of it is the next iteration.
    """
    code = range(start, loop.end)
    stored = {name for i in code for name in _local_names(instructions[i])[1]}
    if any(instructions[i].opname.startswith(_LEAVES_A_TRACE) for i in code):
        return False
    if any(_local_names(instructions[i])[0] & stored for i in range(len(instructions)) if i not in code):
        return False
    return _reads_only_what_it_stored(instructions, loop, code, stored)


_LEAVES_A_TRACE = (
    # STORE_FAST and STORE_SUBSCR are judged elsewhere: by names, and as operators or as changes of an object.
    "STORE_ATTR",
    "STORE_DEREF",
    "STORE_GLOBAL",
    "STORE_NAME",
    "STORE_SLICE",
    "DELETE_",
    "RETURN",
    "YIELD",
    "RAISE",
    "IMPORT",
    "MAKE_FUNCTION",
    "LOAD_CLOSURE",
    "SETUP_",
)


def _reads_only_what_it_stored(instructions: Instructions, loop: Loop, code: range, stored: set[str]) -> bool:
    """Definite assignment: on every way through ``code``, a name of ``stored`` is set before it is read."""
    position = _position(instructions)
    assigned: dict[int, set[str]] = {}
    waiting = [(code.start, set[str]())]
    while waiting:
        at, names = waiting.pop()
        if at == loop.head:
            continue  # the next iteration
        if at not in code:
            return False  # another way out
        known = assigned.get(at)
        if known is not None and known <= names:
            continue
        names = names if known is None else names & known
        assigned[at] = names
        reads, writes = _local_names(instructions[at])
        # The fused instructions of Python 3.13 that store and read, store first.
        if (reads & stored) - names - writes:
            return False
        after = names | writes
        name, target = instructions[at].opname, instructions[at].target
        if target is not None:
            waiting.append((position[id(target)], after))
        is_jump = name.startswith("JUMP_") and "_IF_" not in name
        if not is_jump and not name.startswith("RERAISE"):
            waiting.append((at + 1, after))
    return True


def _position(instructions: Instructions) -> dict[int, int]:
    return {id(instruction): i for i, instruction in enumerate(instructions)}


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
