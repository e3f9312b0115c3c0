"""What a tensor is a copy of, and what a new one is filled with."""

from __future__ import annotations

import enum
from typing import Any

import torch

from glue_compiler.fx.operators import Call, Operators, Value

aten = torch.ops.aten

COPIES = {
    aten.to,
    aten._to_copy,
    aten.type_as,
    aten.clone,
    aten.contiguous,
    aten.detach,
    aten.detach_,
    aten.alias,
    aten.lift_fresh,
}
"""Operators that give the numbers of ``self``, rounded to the dtype of the result."""

SAME_ELEMENTS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.view_as.default,
    aten.reshape_as.default,
}
"""Overloads that give the elements of ``self``, in their order, in another shape."""


class Fill(enum.Enum):
    ZEROS = 0
    ONES = 1
    EMPTY = "anything"


_FILLS = {
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), Fill.ZEROS),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), Fill.ONES),
    **dict.fromkeys((aten.empty, aten.empty_like, aten.new_empty), Fill.EMPTY),
}
_FULL = {aten.full, aten.full_like, aten.new_full}


def copied_from(operators: Operators, value: Any) -> Value | None:
    """The tensor that ``value`` is a copy or a cast of. What a cast rounds is for the caller to ask."""
    call = operators.does(value) if isinstance(value, Value) else None
    source = call.arguments.get("self") if call is not None else None
    if call is None or not isinstance(source, Value):
        return None
    same = call.overload in SAME_ELEMENTS and operators.meta(source).shape == operators.meta(value).shape
    return source if same or call.operator in COPIES else None


def without_aliases(operators: Operators, value: Value) -> Value:
    """The tensor that ``value`` is another name of."""
    while (call := operators.does(value)) is not None and call.operator in (aten.detach, aten.alias):
        value = call.arguments["self"]
    return value


def fill_of(operators: Operators, value: Any) -> Fill | None:
    """What all elements of ``value`` are, if it is a new tensor."""
    if not isinstance(value, Value):
        return None
    match operators.does(without_aliases(operators, value)):
        case Call(operator) if operator in _FILLS:
            return _FILLS[operator]
        case Call(operator, {"fill_value": number}) if operator in _FULL and type(number) in (int, float):
            return {0: Fill.ZEROS, 1: Fill.ONES}.get(number)
    return None
