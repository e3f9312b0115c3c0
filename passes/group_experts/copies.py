"""What a tensor is a copy of, and what a new one is filled with."""

from __future__ import annotations

import enum
from typing import Any

import torch

from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.operators import Call, Operators, Value

aten = torch.ops.aten

COPIES = {*CONVERSIONS, aten.clone, aten.detach, aten.alias, aten.lift_fresh}
"""Operators that give the numbers of ``self``, rounded to the dtype of the result."""


class Fill(enum.Enum):
    ZEROS = 0
    ONES = 1
    EMPTY = "anything"


_FILLS = {
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero), Fill.ZEROS),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), Fill.ONES),
    **dict.fromkeys((aten.empty, aten.empty_like, aten.new_empty), Fill.EMPTY),
}
_FULL = {aten.full, aten.full_like, aten.new_full, aten.fill}


def copied_from(operators: Operators, value: Any) -> Value | None:
    """The tensor that ``value`` is a copy or a cast of. What a cast rounds is for the caller to ask."""
    call = operators.does(value)
    source = call.arguments.get("self") if call is not None else None
    if call is None or not isinstance(source, Value):
        return None
    same = call.overload is aten.view.default and operators.shape(source) == operators.shape(value)
    return source if same or call.operator in COPIES else None


def fill_of(operators: Operators, value: Any) -> Fill | None:
    """What all elements of ``value`` are, if it is a new tensor."""
    call = operators.does(value)
    while call is not None and call.operator in (aten.detach, aten.alias):  # other names of one tensor
        call = operators.does(call.arguments["self"])
    match call:
        case Call(operator) if operator in _FILLS:
            return _FILLS[operator]
        case Call(operator, {"fill_value": number} | {"value": number}) if operator in _FULL:
            return {0: Fill.ZEROS, 1: Fill.ONES}.get(number) if type(number) in (int, float) else None
    return None
