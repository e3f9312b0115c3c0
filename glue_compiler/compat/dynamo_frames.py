"""Dynamo: what a translator that is at work can be asked."""

from __future__ import annotations

import builtins
import contextlib
from typing import Any

import torch

from glue_compiler.compat.symbols import unbacked_symbols


def is_assertion(frame: Any, at: int) -> bool:
    """Is the jump at ``at`` the one over an ``assert``'s raise? Dynamo traces those as an operator."""
    following = frame.instructions[at + 1] if at + 1 < len(frame.instructions) else None
    return following is not None and following.opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")


def local_value(frame: Any, name: str) -> Any:
    """The int, sympy expression or node of a tensor that a local name holds while it is traced; None for others."""
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    variable = frame.symbolic_locals.get(name)
    if isinstance(variable, SymNodeVariable):
        return variable.sym_num.node.expr if isinstance(variable.sym_num, torch.SymInt) else None
    if isinstance(variable, TensorVariable):
        return variable.as_proxy().node
    if variable is not None and variable.is_python_constant():
        value = variable.as_python_constant()
        return value if type(value) is int else None
    return None


def is_list_in(frame: Any, name: str, variable: Any) -> bool:
    """Does a local name hold the list that ``variable`` stands for: a plain list?"""
    from torch._dynamo.variables.lists import ListVariable

    held = frame.symbolic_locals.get(name)
    return type(held) is ListVariable and held.mutation_type is variable.mutation_type


def is_tracing(frame: Any) -> bool:
    """Is ``frame`` the translator at work, and not one that it has inlined?"""
    return frame.output.current_tx is frame


def may_catch(frame: Any) -> bool:
    """Would code around what is traced now go on after an exception: a ``try``, or a user's context manager?

    In ``frame`` or in one that it is inlined into. With blocks of torch's own modes catch nothing.
    """
    while frame is not None:
        at = instruction_index(frame)
        if at is not None and _is_handled(frame, frame.instructions[at]):
            return True
        frame = getattr(frame, "parent", None)
    return False


def _is_handled(frame: Any, instruction: Any) -> bool:
    if any(map(_may_swallow, getattr(frame, "active_generic_context_managers", ()))):
        return True
    if any(block.inst.opname == "SETUP_FINALLY" for block in frame.block_stack):  # Python 3.10
        return True
    seen: set[int] = set()
    entry = instruction.exn_tab_entry
    while entry is not None and id(entry.target) not in seen:
        seen.add(id(entry.target))
        if _goes_on(frame, frame.indexof[entry.target]):
            return True
        entry = entry.target.exn_tab_entry  # of a handler that only cleans up
    return False


def _may_swallow(context: Any) -> bool:
    """A generator's context manager goes on with exceptions only if its code says ``except`` around the ``yield``; few
    do, and models are called under many (peft's hooks)."""
    return not isinstance(getattr(context, "cm_obj", None), _GENERATED)


_GENERATED = type(contextlib.contextmanager(lambda: iter(()))())


def _goes_on(frame: Any, at: int) -> bool:
    """Is an exception that data decides looked at, or dropped? ``finally`` and ``with`` raise it again."""
    code = frame.instructions
    if code[at].opname != "PUSH_EXC_INFO" or code[at + 1].opname == "WITH_EXCEPT_START":
        return False
    while at < len(code) and code[at].opname not in _DECIDES:
        at += 1
        while at < len(code) and _is_never_of_data(frame, code[at - 1], code[at]):
            at = frame.indexof[code[at + 1].target]  # the next clause
    return at < len(code) and code[at].opname != "RERAISE"


_DECIDES = {"CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT", "RERAISE"}


def _is_never_of_data(frame: Any, loads: Any, matches: Any) -> bool:
    """Is the clause for one class, named by a global, of exceptions that speak of types and names and not of values?"""
    if matches.opname != "CHECK_EXC_MATCH" or loads.opname != "LOAD_GLOBAL":
        return False
    caught = frame.f_globals.get(loads.argval, getattr(builtins, loads.argval, None))
    return isinstance(caught, type) and issubclass(caught, TypeError | AttributeError | NameError | ImportError)


def depends_on_data(variable: Any, depth: int = 2) -> bool:
    """Is it a number that data decides, or does it hold one: a range, a list, the keys of a dictionary?"""
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.lists import BaseListVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    if isinstance(variable, SymNodeVariable):
        return bool(unbacked_symbols(variable.sym_num))
    if depth == 0 or not isinstance(variable, BaseListVariable | ConstDictVariable):
        return False
    held = variable.items
    inside = [*(getattr(key, "vt", None) for key in held), *held.values()] if isinstance(held, dict) else held
    return any(depends_on_data(each, depth - 1) for each in inside)


def instruction_index(frame: Any) -> int | None:
    """Index of the instruction that a Dynamo translator runs; None when it is done."""
    return frame.instruction_pointer - 1 if frame.instruction_pointer is not None else None


def loop_about_to_start(frame: Any) -> int | None:
    """Index of the FOR_ITER, if the translator is at the GET_ITER right before it."""
    at = instruction_index(frame)
    if at is None or frame.instructions[at].opname != "GET_ITER" or frame.instructions[at + 1].opname != "FOR_ITER":
        return None
    return at + 1
