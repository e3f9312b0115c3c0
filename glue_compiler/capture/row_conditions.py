"""Reads conditions that tell no rows from some rows: ``n == 0`` and ``n > 0`` of numbers or tensors, ``mask.any()``."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.compat import numpy_capture
from glue_compiler.compat.symbols import unbacked_symbols
from glue_compiler.fx.values import value_of

_COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "greater": operator.gt,
    "le": operator.le, "less_equal": operator.le, "ge": operator.ge, "lt": operator.lt,
}  # fmt: skip
_COUNTS = (torch.bool, torch.int32, torch.int64)


@dataclass(frozen=True)
class RowCondition:
    """A condition on a number of rows, which is not negative, that only tells zero from all others.

    ``symbol``: the sympy symbol of the number, or None; ``number``: its node (of the tensor that it is read from), or
    that of a boolean that says whether it is not zero. ``if_empty``: the condition's value at zero.
    """

    node: fx.Node
    symbol: Any
    number: fx.Node
    if_empty: bool


def row_condition(condition: fx.Node, expression: Any) -> RowCondition | None:
    """Args: the node of a condition, and its sympy expression if it is no tensor."""
    compared = _compared(condition)
    number, if_empty = compared if compared is not None else (condition, False)
    while number.target == "item" and isinstance(number.args[0], fx.Node):
        number = number.args[0]  # Dynamo may erase the read of a number that nothing else uses
    if expression is not None:
        symbol = _tells_zero(expression)
        return (
            None
            if symbol is None
            else RowCondition(condition, symbol, number, bool(sympy.sympify(expression).subs(symbol, 0)))
        )
    value = value_of(number)
    if not isinstance(value, torch.Tensor) or value.dtype not in _COUNTS or value.dim() > 1:
        return None
    return RowCondition(condition, None, number, if_empty)


def _compared(condition: fx.Node) -> tuple[fx.Node, bool] | None:
    """The number that is compared, and the result for zero, if that is another one than for all positive numbers."""
    target: Any = condition.target
    name = numpy_capture.numpy_function(target) or getattr(target, "__name__", target)
    compare = _COMPARE.get(str(name).strip("_"))
    if compare is None or len(condition.args) != 2 or condition.kwargs:
        return None
    number, bound = condition.args
    if not isinstance(number, fx.Node) or type(bound) is not int or bound not in (0, 1):
        return None
    at_zero, at_one, at_two = (bool(compare(n, bound)) for n in range(3))
    return (number, at_zero) if at_zero != at_one and at_one == at_two else None


def _tells_zero(condition: Any) -> Any | None:
    """The unbacked symbol, if ``condition`` only asks whether it, a size, is zero."""
    symbols = list(getattr(condition, "free_symbols", ()))
    if len(symbols) != 1 or not unbacked_symbols(condition):
        return None
    symbol = symbols[0]
    zero, one = sympy.S.Zero, sympy.S.One
    asked = {sympy.Eq(symbol, zero), sympy.Ne(symbol, zero), symbol > zero, symbol <= zero, symbol >= one, symbol < one}
    # ``if n:`` asks the number itself.
    known = condition == symbol or condition in asked or getattr(condition, "reversed", None) in asked
    return symbol if known else None
