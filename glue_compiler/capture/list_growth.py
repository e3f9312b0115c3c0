"""Reads in bytecode how a function uses a list that a loop appends to: as a whole, joined by a call, or otherwise.

Instructions are Dynamo's, see :mod:`glue_compiler.capture.bytecode`.
"""

from __future__ import annotations

import dis
from dataclasses import dataclass
from typing import Any

from glue_compiler.capture.bytecode import Instructions, Loop, Span

_CALLS = ("CALL", "CALL_FUNCTION", "CALL_KW", "CALL_FUNCTION_KW", "CALL_METHOD")
# Opcode → how many values it takes, of those that stand between a list and what takes it. Others are not followed.
_TAKES = {
    **dict.fromkeys(("NOP", "CACHE", "KW_NAMES", "PUSH_NULL", "NOT_TAKEN"), 0),
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_GLOBAL", "LOAD_DEREF"), 0),
    **dict.fromkeys(("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"), 0),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "POP_TOP", "STORE_FAST", "TO_BOOL"), 1),
    **dict.fromkeys(("BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP"), 2),
    "STORE_SUBSCR": 3,
}
_BUILDS = ("BUILD_SLICE", "BUILD_TUPLE", "BUILD_LIST")
_READS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW")


@dataclass(frozen=True)
class Growth:
    """A list that a function makes empty, and appends to in one statement."""

    name: str
    append: int
    """The instruction that appends."""
    calls: frozenset[int]
    """The other instructions that take the list, as an argument."""


def growth_of(instructions: Instructions, loop: Loop, span: Span, method: int) -> Growth | None:
    """The list whose ``append`` is read at ``method`` in ``span``, to append one item, if nothing else can tell how
    long it is.

    It is the value of one local name, made empty. The loop does nothing else with it, and other code gives it to
    calls, or asks whether it is empty.
    """
    read = method - 1
    append = _appends_at(instructions, read) if instructions[read].opname in _READS else None
    if append is None or not span.start <= read < append < span.end:
        return None
    name = instructions[read].argval
    calls = _uses(instructions, name, append)
    if calls is None or not _starts_empty(instructions, name):
        return None
    used = [i for i in range(loop.head, loop.end) if name in _names(instructions[i].argval)]
    return Growth(name, append, calls) if used == [read] else None


def _appends_at(instructions: Instructions, read: int) -> int | None:
    """Where ``name.append(value)`` is called, a statement, if the name is read at ``read`` for that."""
    method = instructions[read + 1]
    if method.opname not in ("LOAD_ATTR", "LOAD_METHOD") or method.argval != "append":
        return None
    call = taken_at(instructions, read + 1)
    if call is None or instructions[call].opname not in _CALLS or instructions[call].arg != 1:
        return None
    after = taken_at(instructions, call)
    return call if after is not None and instructions[after].opname == "POP_TOP" else None


def _uses(instructions: Instructions, name: str, append: int) -> frozenset[int] | None:
    calls = set()
    for i, instruction in enumerate(instructions):
        if instruction.opname in ("LOAD_CLOSURE", "LOAD_DEREF") and instruction.argval == name:
            return None
        if not instruction.opname.startswith("LOAD_FAST") or name not in _names(instruction.argval):
            continue
        if instruction.opname not in _READS:
            return None
        if _appends_at(instructions, i) == append:
            continue
        taken = taken_at(instructions, i)
        if taken is None:
            return None
        if _asks_if_empty(instructions, i, taken):
            continue
        if instructions[taken].opname not in _CALLS:
            return None
        calls.add(taken)
    return frozenset(calls)


def _asks_if_empty(instructions: Instructions, read: int, taken: int) -> bool:
    """``if name``, ``if not name`` and ``if len(name)``."""
    if instructions[taken].opname in _CALLS:
        before = instructions[read - 1]
        is_len = before.opname == "LOAD_GLOBAL" and before.argval == "len" and instructions[taken].arg == 1
        result = taken_at(instructions, taken) if is_len else None
        if result is None:
            return False
        taken = result
    if instructions[taken].opname == "TO_BOOL":
        taken += 1
    return instructions[taken].opname.startswith("POP_JUMP") and "NONE" not in instructions[taken].opname


def _starts_empty(instructions: Instructions, name: str) -> bool:
    """Is every value that the name is given an empty list, which nothing else holds?"""
    stores = [
        i for i, each in enumerate(instructions) if each.opname.startswith("STORE") and name in _names(each.argval)
    ]
    return bool(stores) and all(
        instructions[i].opname == "STORE_FAST" and _is_empty_list(instructions, i) for i in stores
    )


def _is_empty_list(instructions: Instructions, store: int) -> bool:
    """``name = []``, also as the first of two: ``name, start = [], 0``."""
    before = [instructions[i].opname for i in range(max(store - 3, 0), store)]
    if before[:2] == ["BUILD_LIST", "LOAD_CONST"] and before[2:] in (["SWAP"], ["ROT_TWO"], ["STORE_FAST"]):
        made = store - 3
    else:
        made = store - 1
    return instructions[made].opname == "BUILD_LIST" and bool(instructions[made].arg == 0)


def _names(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def taken_at(instructions: Instructions, made: int) -> int | None:
    """The instruction that takes what the one at ``made`` pushes last; None if it is not found in straight code."""
    above = 0
    for i in range(made + 1, len(instructions)):
        instruction = instructions[i]
        name, arg = instruction.opname, instruction.arg
        if name.startswith("POP_JUMP"):
            return i if above == 0 else None
        if name == "PRECALL":  # 3.11 has the arguments taken here, and the rest by the call
            continue
        takes = _taken_by_call(name, arg) if name in _CALLS else _TAKES.get(name, arg if name in _BUILDS else None)
        if takes is None:
            return None
        if takes > above:
            return i
        above += 1 - takes if name in _CALLS else _effect(instruction)
    return None


def _effect(instruction: Any) -> int:
    """By how many values the stack grows."""
    has_argument = instruction.opcode >= dis.HAVE_ARGUMENT
    return dis.stack_effect(instruction.opcode, instruction.arg or 0 if has_argument else None)


def _taken_by_call(name: str, arg: int) -> int:
    """Arguments, the function, and what stands beside it."""
    return arg + {"CALL_FUNCTION": 1, "CALL": 2, "CALL_METHOD": 2, "CALL_FUNCTION_KW": 2, "CALL_KW": 3}[name]
