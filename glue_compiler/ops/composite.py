"""Operators that are made of others, and are traced through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def composite(schema: str) -> Callable[[Function], Function]:
    """Register a function as ``torch.ops.glue.<its name>``: AOTAutograd traces what it is made of."""

    def register(function: Function) -> Function:
        name = f"glue::{function.__name__}"
        torch.library.define(name, schema)
        torch.library.impl(name, "CompositeImplicitAutograd")(function)
        return function

    return register
