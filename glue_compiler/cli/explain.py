"""``glue explain``: what glue would do to a function of the user's."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from glue_compiler.cli.console import console
from glue_compiler.errors import GlueError, unknown_name

STYLES = {
    "graph ": "bold",
    "glue ": "bold",
    "Worth": "green",
    "Left": "yellow",
    "left as it was": "yellow",
    "host sync that remains": "red",
    "host sync once": "cyan",
    "ends at": "red",
}


WANTED = "returns no call to explain: return (model, args, kwargs), such as (model, (), {'input_ids': ids})"


class TargetError(GlueError):
    """``module:function`` names nothing that can be explained."""


def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="Such as `train:build`; the module is looked for in this folder first."
        ),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", "-o", metavar="KEY=VALUE", help="An option of glue, as in `options={...}`; repeatable."
        ),
    ] = None,
) -> None:
    """Report what glue rewrites, what that is worth and what is left; then graphs, host syncs, and each reason once.

    FUNCTION takes no arguments. It may return `(model, args, kwargs)`, `(model, args)`, `(model, kwargs)` or
    `(model,)`: then that call is explained. Otherwise the function itself is. One forward runs, in eager operators;
    nothing is compiled to code.
    """
    import glue_compiler

    function = find(target)
    model, args, kwargs = call_of(function)
    options = dict(_key_and_value(text) for text in option or ())
    explanation = glue_compiler.explain(model, *args, options=options, **kwargs)
    if model is function and not explanation.graphs:
        raise TargetError(f"'{target}' computes nothing with tensors, and {WANTED}")
    out = console()
    for line in str(explanation).splitlines():
        style = next((style for start, style in STYLES.items() if line.strip().startswith(start)), None)
        out.print(line, style=style, markup=False, soft_wrap=True)


def find(target: str) -> Callable[[], Any]:
    """The function that ``module:function`` (or ``module:Class.function``) names.

    Raises:
        TargetError: no such module or name, or it takes arguments.
    """
    module_name, _, path = target.partition(":")
    if not path:
        raise TargetError(f"'{target}' is not MODULE:FUNCTION; write for example 'train:build'")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        raise TargetError(f"there is no module '{module_name}' here or installed (in {Path.cwd()})") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise TargetError(f"in '{target}': {unknown_name('name', part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"'{target}' is not a function, but {type(found).__name__}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise TargetError(
            f"'{target}' takes arguments ({error}); write a function without any that returns (model, args, kwargs)"
        ) from error
    return found


def call_of(function: Callable[[], Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call to explain: what ``function`` returns, if that is ``(model, args, kwargs)``; else its own.

    Raises:
        TargetError: it returns a model in another way.
    """
    match returned := function():
        case (model,) if callable(model):
            return model, (), {}
        case (model, tuple() | list() as args) if callable(model):
            return model, tuple(args), {}
        case (model, dict() as kwargs) if callable(model):
            return model, (), kwargs
        case (model, tuple() | list() as args, dict() as kwargs) if callable(model):
            return model, tuple(args), kwargs
    found = returned if isinstance(returned, tuple | list) else (returned,)
    if any(isinstance(each, torch.nn.Module) for each in found):
        what = ", ".join(type(each).__name__ for each in found)
        shown = f"({what})" if isinstance(returned, tuple | list) else f"a {what} alone"
        raise TargetError(f"'{function.__name__}' returns {shown}, and so {WANTED}")
    return function, (), {}


def _key_and_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise TargetError(f"--option takes KEY=VALUE, not '{text}'")
    return key, _typed(value)


def _typed(value: str) -> Any:
    lowered = value.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    return int(value) if value.isdecimal() else value
