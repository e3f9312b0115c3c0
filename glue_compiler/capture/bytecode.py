"""Reads the bytecode that Dynamo translates: what code of a loop leaves behind, and where a branch goes.

Instructions are Dynamo's: ``opname``, ``argval`` and ``target``, the instruction that it may jump to, or None.
"""

from __future__ import annotations

import dis
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Instructions = Sequence[Any]


@dataclass(frozen=True)
class Loop:
    """Indices of a loop's FOR_ITER and of the instruction after the loop."""

    head: int
    end: int


@dataclass(frozen=True)
class Span:
    """Instructions from ``start`` up to ``end``; ``exit`` is what runs next."""

    start: int
    end: int
    exit: int


def loop_at(instructions: Instructions, head: int) -> Loop:
    """The loop whose FOR_ITER is at ``head``."""
    return Loop(head, _position(instructions)[id(instructions[head].target)])


def enclosing_loop(instructions: Instructions, at: int) -> Loop | None:
    """The innermost ``for`` loop whose body holds the instruction at ``at``."""
    for head in range(at - 1, -1, -1):
        if instructions[head].opname == "FOR_ITER" and at < (loop := loop_at(instructions, head)).end:
            return loop
    return None


def outermost_loop(instructions: Instructions, at: int) -> Loop | None:
    """The outermost ``for`` loop whose body holds the instruction at ``at``, if it is in no ``while`` loop."""
    loop, outer = None, enclosing_loop(instructions, at)
    while outer is not None:
        loop, outer = outer, enclosing_loop(instructions, outer.head)
    if loop is not None:
        position = _position(instructions)
        jumps = ((i, position[id(each.target)]) for i, each in enumerate(instructions) if each.target is not None)
        if any(i >= loop.end and to <= loop.head for i, to in jumps):
            return None
    return loop


def statement_behind(instructions: Instructions, loop: Loop) -> int | None:
    """Index of the statement behind ``loop``; None if there is none, or it is in a ``with`` or ``try``."""
    at = loop.end
    if instructions[at].opname == "END_FOR":  # Python 3.12 pops the iterator there
        at += 1
        if instructions[at].opname in ("POP_ITER", "POP_TOP"):
            at += 1
    is_statement = _stack_depth(instructions, 0, at, 0) == 0 and instructions[at].exn_tab_entry is None
    return at if is_statement else None


def read_behind(instructions: Instructions, loop: Loop) -> list[str] | None:
    """The local names that code behind ``loop`` reads before it stores them; None if one may have been deleted."""
    if any(each.opname.startswith(("DELETE_FAST", "LOAD_FAST_AND_CLEAR")) for each in instructions[loop.head :]):
        return None
    names = dict.fromkeys(name for each in instructions for name in sorted(set().union(*_local_names(each))))
    return [name for name in names if _reads_before_it_stores(instructions, loop.end, {name})]


def computes(instructions: Instructions, start: int) -> bool:
    """Does code from ``start`` on call anything, or compute with an operator?"""
    return any(each.opname.startswith(("CALL", "BINARY", "UNARY")) for each in instructions[start:])


def skipped_by(instructions: Instructions, at: int, condition: bool, loop: Loop) -> Span | None:
    """What the conditional jump at ``at`` skips when the condition is ``condition``.

    The rest of the iteration, or less; None if it leads to code of its own.
    """
    name = instructions[at].opname
    if not name.startswith("POP_JUMP") or not name.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    position = _position(instructions)
    jumps = condition == name.endswith("IF_TRUE")
    to = position[id(instructions[at].target)] if jumps else at + 1
    while loop.head < to < loop.end:
        instruction = instructions[to]
        if _is_jump(instruction):
            to = position[id(instruction.target)]
        elif instruction.opname in ("NOP", "NOT_TAKEN"):
            to += 1
        else:
            break
    if to == loop.head:
        return Span(at + 1, loop.end, loop.head)
    # A part of an iteration is a statement: one of an expression leaves a value on the stack.
    is_statement = jumps and at < to < loop.end and _stack_depth(instructions, loop.head + 1, at, 1) == 1
    return Span(at + 1, to, to) if is_statement else None


def _stack_depth(instructions: Instructions, start: int, end: int, depth: int) -> int | None:
    """How many values are on the stack at ``end``, if there are ``depth`` at ``start``."""
    position = _position(instructions)
    waiting, seen = [(start, depth)], set()
    while waiting:
        at, depth = waiting.pop()
        if at == end:
            return depth
        if at in seen or at >= len(instructions):
            continue
        seen.add(at)
        instruction = instructions[at]
        arg = (instruction.arg or 0) if instruction.opcode >= dis.HAVE_ARGUMENT else None
        if instruction.target is not None:
            effect = dis.stack_effect(instruction.opcode, arg, jump=True)
            waiting.append((position[id(instruction.target)], depth + effect))
        if not _is_jump(instruction):
            waiting.append((at + 1, depth + dis.stack_effect(instruction.opcode, arg, jump=False)))
    return None


def left_behind(instructions: Instructions, loop: Loop, span: Span) -> frozenset[str] | None:
    """The local names that ``span`` stores and later code reads; None if it may have other effects.

    The span stores to local names alone, and the only way out of it is its exit.
    """
    code = range(span.start, span.end)
    position = _position(instructions)
    if any(instructions[i].opname.startswith(_LEAVES_A_TRACE) for i in code):
        return None
    targets = {position[id(instructions[i].target)] for i in code if instructions[i].target is not None}
    if not all(to in code or to == span.exit for to in targets):  # a `continue` would skip what follows the span
        return None
    if span.end == loop.end and not _is_jump(instructions[code[-1]]):
        return None
    stored = {name for i in code for name in _local_names(instructions[i])[1]}
    return frozenset(n for n in stored if _reads_before_it_stores(instructions, span.exit, {n}))


def is_carried_within(instructions: Instructions, loop: Loop, span: Span, name: str) -> bool:
    """Does the loop store ``name`` once, in ``span``, and nothing read it after the loop before it is stored again?"""
    stores = [i for i in range(loop.head, loop.end) if name in _local_names(instructions[i])[1]]
    once = len(stores) == 1 and span.start <= stores[0] < span.end
    return once and not _reads_before_it_stores(instructions, loop.end, {name})


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
