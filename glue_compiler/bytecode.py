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
        if _is_jump(instruction):
            at = position[id(instruction.target)]
        elif instruction.opname in ("NOP", "NOT_TAKEN"):
            at += 1
        else:
            return False
    return at == loop.head


def leaves_nothing_behind(instructions: Instructions, loop: Loop, start: int) -> bool:
    """Is what the code from ``start`` to the end of an iteration does lost when the iteration ends?

    It stores to local names alone, whatever runs afterwards stores such a name again before it reads it, and the only
    way out of it is the next iteration.
    """
    code = range(start, loop.end)
    position = _position(instructions)
    if any(instructions[i].opname.startswith(_LEAVES_A_TRACE) for i in code):
        return False
    targets = {position[id(instructions[i].target)] for i in code if instructions[i].target is not None}
    if not all(to in code or to == loop.head for to in targets) or not _is_jump(instructions[code[-1]]):
        return False
    stored = {name for i in code for name in _local_names(instructions[i])[1]}
    return not _reads_before_it_stores(instructions, loop.head, stored)


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


def _reads_before_it_stores(instructions: Instructions, start: int, names: set[str]) -> bool:
    """Is there a way from ``start`` on which a name of ``names`` is read before it is stored?"""
    position = _position(instructions)
    stored_at: dict[int, set[str]] = {}
    waiting = [(start, set[str]())]
    while waiting:
        at, stored = waiting.pop()
        if at >= len(instructions):
            continue
        known = stored_at.get(at)
        if known is not None and known <= stored:
            continue
        stored = stored if known is None else stored & known
        stored_at[at] = stored
        instruction = instructions[at]
        reads, writes = _local_names(instruction)
        # The fused instructions of Python 3.13 that store and read, store first.
        if (reads & names) - stored - writes:
            return True
        after = stored | writes
        if instruction.target is not None:
            waiting.append((position[id(instruction.target)], after))
        if not _is_jump(instruction) and not instruction.opname.startswith(("RETURN", "RAISE", "RERAISE")):
            waiting.append((at + 1, after))
    return False


def _is_jump(instruction: Any) -> bool:
    """Does it always jump?"""
    return instruction.opname.startswith("JUMP_") and "_IF_" not in instruction.opname


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
