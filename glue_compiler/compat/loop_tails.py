"""Dynamo: what comes behind a loop that Python runs becomes a function, which Dynamo converts when Python calls it.

Dynamo goes on behind a break of its graph, but not behind one in a loop: loop and rest of the function are Python's.
"""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_code_from: weakref.WeakKeyDictionary[types.CodeType, dict[int, types.CodeType]] = weakref.WeakKeyDictionary()
"""Code → index of an instruction → code from there on: the same for each conversion, as Dynamo's caches go by code."""


_OF_LOCALS = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"}
"""What may be a function that sees the names of the function that calls it."""


@dataclass(frozen=True)
class Tail:
    """The instructions of a function from ``start``, behind the loop whose FOR_ITER is at ``head``.

    ``names``: the local names that they read.
    """

    head: int
    start: int
    names: Sequence[str]


def is_separable(frame: Any) -> bool:
    """Can code of the function that ``frame`` translates be a function of its own, its locals the arguments?"""
    code = frame.f_code
    shares_cells = bool(code.co_cellvars or code.co_freevars)
    looks_at_locals = not _OF_LOCALS.isdisjoint(code.co_names)
    return frame.parent is None and not (frame.block_stack or shares_cells or looks_at_locals)


def call_behind_loop(frame: Any, tail: Tail) -> None:
    """In the code that Dynamo has made, in which Python runs the loop, Python calls ``tail`` then.

    Args:
        frame: Dynamo's translator, which has just left the loop to Python.
    """
    from torch._dynamo import bytecode_transformation as made

    head, start = frame.instructions[tail.head], frame.instructions[tail.start]
    function = types.FunctionType(_tail_of(frame.f_code, tail), frame.f_globals)
    arguments = [made.create_instruction("LOAD_FAST", argval=name) for name in tail.names]
    call = [
        *made.add_push_null(made.create_load_const(function, checked=False)),
        *arguments,
        *made.create_call_function(len(arguments), push_null=False),
        made.create_instruction("RETURN_VALUE"),
    ]
    if head.target is start:
        head.target = call[0]
    instructions = frame.output.output_instructions
    at = next(i for i, each in enumerate(instructions) if each is start)
    instructions[at:at] = call


def _tail_of(code: types.CodeType, tail: Tail) -> types.CodeType:
    from torch._dynamo import bytecode_transformation as made

    known = _code_from.setdefault(code, {})
    if tail.start in known:
        return known[tail.start]

    def change(instructions: list[Any], options: dict[str, Any]) -> None:
        start = instructions[tail.start]  # both lists are what Dynamo reads from the code
        options["co_argcount"] = len(tail.names)
        options["co_posonlyargcount"] = options["co_kwonlyargcount"] = 0
        options["co_varnames"] = (*tail.names, *(n for n in options["co_varnames"] if n not in tail.names))
        options["co_flags"] &= ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        options["co_name"] = f"{code.co_name}_behind_loop"
        begin = [made.create_instruction("RESUME", arg=0)] if sys.version_info >= (3, 11) else []
        instructions[:0] = [*begin, made.create_jump_absolute(start)]

    return known.setdefault(tail.start, made.transform_code_object(code, change)[0])
