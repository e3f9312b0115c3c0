"""Dynamo: what a translator that is at work can be asked."""

from __future__ import annotations

from typing import Any

import torch


def is_assertion(frame: Any, at: int) -> bool:
    """Is the jump at ``at`` the one over an ``assert``'s raise? Dynamo traces those as an operator."""
    following = frame.instructions[at + 1] if at + 1 < len(frame.instructions) else None
    return following is not None and following.opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")


def converted_code(frame: Any) -> Any:
    """The code object of the frame that is being converted; ``frame`` may be one that was inlined into it."""
    return frame.output.root_tx.f_code


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


def instructions_of(code: Any) -> Any:
    """The instructions that Dynamo translates a code object from."""
    from torch._dynamo.bytecode_transformation import cleaned_instructions

    return cleaned_instructions(code)


def instruction_index(frame: Any) -> int | None:
    """Index of the instruction that a Dynamo translator runs; None when it is done."""
    return frame.instruction_pointer - 1 if frame.instruction_pointer is not None else None


def loop_about_to_start(frame: Any) -> int | None:
    """Index of the FOR_ITER, if the translator is at the GET_ITER right before it."""
    at = instruction_index(frame)
    if at is None or frame.instructions[at].opname != "GET_ITER" or frame.instructions[at + 1].opname != "FOR_ITER":
        return None
    return at + 1
