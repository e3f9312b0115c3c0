"""Dynamo: which function a frame runs, so that it is known again as a frame of its own, or behind a graph break.

A code object alone is too little: a decorator's wrapper has one for all functions that it wraps, and a base class's
method one for all modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from glue_compiler.compat.dynamo import error_chain
from glue_compiler.compat.layer_calls import value_behind
from glue_compiler.compat.parts import ANY, Feature, Uses

PLACES = Feature(
    "memory of frames that could not be captured",
    {
        "torch._dynamo.resume_execution:ContinueExecutionCache.generated_code_metadata": ANY,
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.run": ANY,
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.starts_line": Uses(names=("lineno",)),
        "torch._dynamo.symbolic_convert:InliningInstructionTranslator": ANY,
        "torch._dynamo.variables.lazy:LazyVariableTracker.peek_value": Uses(("self",)),
        "torch._dynamo.variables.lazy:LazyVariableTracker.unwrap": Uses(("self",)),
    },
)
"""Without it, each frame is tried by itself."""

Place = tuple[Hashable, ...]


def place_of(frame: Any) -> tuple[Place, int | None] | None:
    """The function of a frame that Dynamo is about to convert, and the line at which it goes on behind a break."""
    if not PLACES.is_available():
        return None
    code = frame.f_code
    function = _function_of(code)
    place = _place(function, frame.closure, None if _first_is_cell(function) else first_of_frame(frame))
    return place, None if function is code else code.co_firstlineno


def first_of_frame(frame: Any) -> Any:
    """What the function of a frame that Dynamo is about to convert was called with first."""
    code = _function_of(frame.f_code)
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _function_of(code: CodeType) -> CodeType:
    """The function that goes on in ``code`` behind a break; ``code`` itself, if it begins there."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if resumed is None else resumed.code


def places_in(error: BaseException) -> list[tuple[Place, int]]:
    """The functions, each called by the one before, in whose tracing ``error`` was raised, and the line there.

    None for what a backend has raised.
    """
    if not PLACES.is_available() or any(isinstance(each, BackendCompilerFailed) for each in error_chain(error)):
        return []
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    run, found = InstructionTranslatorBase.run.__code__, []
    for each in error_chain(error):
        at = each.__traceback__
        while at is not None:
            if at.tb_frame.f_code is run:
                translator = at.tb_frame.f_locals["self"]
                found.append((_place_of_translator(translator), translator.lineno))
            at = at.tb_next
    return found


def _place_of_translator(translator: Any) -> Place:
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator

    code = translator.f_code
    closure = getattr(translator, "closure", None)
    if isinstance(translator, InliningInstructionTranslator):
        closure = getattr(getattr(translator.funcvar, "fn", None), "__closure__", None)
    return _place(code, closure, first_argument(translator))


def first_argument(translator: Any) -> Any:
    """The object that a function which is traced was called with first; None if Dynamo does not say."""
    code = translator.f_code
    if not code.co_argcount or _first_is_cell(code):
        return None
    return value_behind(translator.symbolic_locals.get(code.co_varnames[0]))


def _first_is_cell(code: CodeType) -> bool:
    """Do inner functions read the first argument? Dynamo's record of it is the cell's then."""
    return code.co_argcount > 0 and code.co_varnames[0] in code.co_cellvars


def _place(code: CodeType, closure: Any, first: Any) -> Place:
    owner = weakref.ref(type(first)) if isinstance(first, torch.nn.Module) else None
    return weakref.ref(code), _functions(closure), owner


def _functions(closure: Any, depth: int = 3) -> Place:
    """The codes of the functions that a function holds, and of those that they hold: decorators stand on decorators."""
    held = []
    for cell in closure or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            continue
        if isinstance(value, FunctionType):
            inner = _functions(value.__closure__, depth - 1) if depth else ()
            held.append((weakref.ref(value.__code__), inner))
    return tuple(held)
