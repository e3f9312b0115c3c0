"""What code that may not have to run may do to Python: touch what is known to be harmless, and nothing else.

Lets through: instructions that move values, compute, branch and call; values of the kinds in
``compat/harmless_values.py``; writes to lists and the like that the code itself has made. That is safe because all
that an instruction touches is on the stack, where an instruction before has put it, and functions that are called are
either looked at in the same way or known to read only. What tensors are made to do is in the graph, and for a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glue_compiler.compat import dynamo_tracing, harmless_values

_INSTRUCTIONS = {
    # Values on the stack, and local names (what of those outlives the code is read in its bytecode).
    "CACHE", "COPY", "COPY_FREE_VARS", "DUP_TOP", "DUP_TOP_TWO", "END_FOR", "EXTENDED_ARG", "KW_NAMES", "MAKE_CELL",
    "NOP", "NOT_TAKEN", "POP_ITER", "POP_TOP", "PRECALL", "PUSH_NULL", "RESUME", "ROT_FOUR", "ROT_N", "ROT_THREE",
    "ROT_TWO", "STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "SWAP", "UNPACK_SEQUENCE",
    # Reads. Of an attribute, item or global too: what runs for it is instructions, or is of a listed kind.
    "BINARY_SLICE", "BINARY_SUBSCR", "LOAD_ATTR", "LOAD_CLOSURE", "LOAD_CONST", "LOAD_DEREF", "LOAD_FAST",
    "LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "LOAD_GLOBAL",
    "LOAD_METHOD", "LOAD_SMALL_INT",
    # New values.
    "BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_MAP", "BUILD_SET", "BUILD_SLICE", "BUILD_TUPLE", "DICT_MERGE",
    "LIST_APPEND", "LIST_EXTEND", "LIST_TO_TUPLE", "MAKE_FUNCTION", "MAP_ADD", "SET_FUNCTION_ATTRIBUTE",
    # Operators.
    "BINARY_ADD", "BINARY_AND", "BINARY_FLOOR_DIVIDE", "BINARY_MATRIX_MULTIPLY", "BINARY_MODULO", "BINARY_MULTIPLY",
    "BINARY_OP", "BINARY_OR", "BINARY_POWER", "BINARY_SUBTRACT", "BINARY_TRUE_DIVIDE", "COMPARE_OP", "CONTAINS_OP",
    "INPLACE_ADD", "INPLACE_MULTIPLY", "INPLACE_SUBTRACT", "INPLACE_TRUE_DIVIDE", "IS_OP", "TO_BOOL", "UNARY_INVERT",
    "UNARY_NEGATIVE", "UNARY_NOT",
    # Where to go on: the code's only way out is known from its bytecode.
    "FOR_ITER", "GET_ITER", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_FORWARD",
    "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP",
    # Calls, and returns from the functions that are called.
    "CALL", "CALL_FUNCTION", "CALL_FUNCTION_EX", "CALL_FUNCTION_KW", "CALL_KW", "CALL_METHOD", "RETURN_CONST",
    "RETURN_VALUE",
    # torch.no_grad() and the like: a context of another kind is no value that is let through.
    "BEFORE_WITH", "LOAD_SPECIAL",
    # Judged by what they write to.
    "STORE_SUBSCR",
}  # fmt: skip


def harm(step: dynamo_tracing.TracedInstruction, is_own: Callable[[Any], bool]) -> str | None:
    """None if the instruction leaves Python as it was, but for objects that are the code's own; else why not.

    Args:
        step: an instruction that Dynamo has traced.
        is_own: did the code itself make this object?
    """
    name = step.instruction.opname
    if name not in _INSTRUCTIONS and not name.startswith("POP_JUMP"):
        return f"its code has the instruction {name}"
    function = None
    if name.startswith("CALL"):
        function = next((value for value in step.taken(1) if not harmless_values.is_placeholder(value)), None)
    for value in step.pushed:
        if (name == "GET_ITER" or harmless_values.is_iter(function)) and harmless_values.is_iterator(value):
            continue  # a new one: to iterate an iterator is to hold it first
        unknown = harmless_values.unknown_value(value, is_own)
        if unknown is not None:
            return f"its code touches {unknown}"
    changed = None
    if name == "STORE_SUBSCR":
        changed = step.taken(0)[1]
        if harmless_values.is_tensor(changed):
            return None
    elif _is_in_place(step.instruction) and harmless_values.is_container(step.taken(1)[0]):
        changed = step.taken(1)[0]
    if changed is not None and not (harmless_values.is_container(changed) and is_own(changed)):
        return "its code may change an object that it has not made"
    if name.startswith("CALL"):
        unknown = harmless_values.unknown_call(function, step.nodes > 0)
        if unknown is not None:
            return f"its code makes {unknown}" if unknown.startswith("a call") else f"its code calls {unknown}"
    return None


def _is_in_place(instruction: Any) -> bool:
    # NB_INPLACE_ADD to NB_INPLACE_XOR: the numbers are CPython's, the same from 3.11 on.
    return instruction.opname.startswith("INPLACE_") or (
        instruction.opname == "BINARY_OP" and 13 <= instruction.arg <= 25
    )
