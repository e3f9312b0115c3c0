"""Numbers and conditions as sympy has them, and what a dtype makes of a number.

Integers are exact where they are proved to fit into their dtype. What is not known of tensors is assumed to be far from
the limits of their dtypes (:data:`LARGEST`), and a row to have fewer than 2**30 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef

from glue_compiler.fx.index_views import NotAView

Expression = Any
"""A sympy number, or a sympy boolean for tensors of bool."""

_MOST_CONDITIONS = 6
_PLACES = 2**30
"""More than any index or size."""
LARGEST = {
    torch.bool: 1,
    torch.uint8: 2**8,
    torch.int8: 2**7,
    torch.int16: 2**15,
    torch.int32: 2**30,
    torch.int64: 2**48,
}
"""What elements of integer tensors that nothing is known of are taken to be at most, in magnitude."""


class TooManyConditions(NotAView):
    """A choice by more conditions than are worth to be tried out."""


def is_boolean(value: Expression) -> bool:
    # sympy's symbols pass for booleans as well; ours are integers.
    return isinstance(value, sympy.logic.boolalg.Boolean) and not isinstance(value, sympy.Symbol)


def as_boolean(value: Expression) -> Any:
    if is_boolean(value):
        return value
    if is_selected_constant(value):
        return holds_where(value, lambda number: number != 0)
    return sympy.Ne(value, 0)


def as_number(value: Expression) -> Any:
    if not is_boolean(value):
        return value
    return select(value, sympy.Integer(1), sympy.Integer(0))


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    if condition == sympy.true or if_true == if_false:
        return if_true
    if condition == sympy.false:
        return if_false
    try:
        return sympy.Piecewise((if_true, condition), (if_false, True), evaluate=False)
    except KeyError:  # sympy 1.14: it takes a free symbol of each condition inside of a condition, and may find none
        raise NotAView("a choice by what was itself chosen by an element of a tensor") from None


def is_selected_constant(value: Any) -> bool:
    """Is it made of constants alone, chosen by conditions?"""
    if isinstance(value, sympy.Piecewise):
        return all(is_selected_constant(branch) for branch, _ in value.args)
    if isinstance(value, sympy.Function | sympy.Symbol):
        return False
    return all(is_selected_constant(part) for part in value.args)


def may_be_nan(value: Any) -> bool:
    """Is it made of elements of floating tensors, whatever they are? What chooses between numbers does not count."""
    if isinstance(value, AppliedUndef):
        return value.is_integer is not True
    if isinstance(value, sympy.Piecewise):
        return any(may_be_nan(branch) for branch, _ in value.args)
    return any(may_be_nan(part) for part in value.args if not is_boolean(part))


def holds_where(value: Any, test: Callable[[Any], bool]) -> Any:
    """For which indices a selected constant passes ``test``, as a boolean expression of the conditions in it.

    Raises:
        TooManyConditions
    """
    conditions: dict[Any, sympy.Symbol] = {}
    _collect_conditions(value, conditions)
    if len(conditions) > _MOST_CONDITIONS:
        raise TooManyConditions(f"a choice by more than {_MOST_CONDITIONS} conditions")
    cases = []
    for truth in itertools.product((True, False), repeat=len(conditions)):
        assigned = dict(zip(conditions, truth, strict=True))
        if test(_evaluate(value, assigned)):
            cases.append(sympy.And(*(name if assigned[c] else sympy.Not(name) for c, name in conditions.items())))
    found = sympy.simplify_logic(sympy.Or(*cases), force=True)
    return found.xreplace({name: condition for condition, name in conditions.items()})


def _collect_conditions(value: Any, into: dict[Any, sympy.Symbol]) -> None:
    if isinstance(value, sympy.Piecewise):
        for branch, condition in value.args:
            if condition != sympy.true:
                into.setdefault(condition, sympy.Symbol(f"condition{len(into)}"))
            _collect_conditions(branch, into)
    elif not is_boolean(value):
        for part in value.args:
            _collect_conditions(part, into)


def _evaluate(value: Any, assigned: dict[Any, bool]) -> Any:
    if isinstance(value, sympy.Piecewise):
        branch = next(b for b, condition in value.args if condition == sympy.true or assigned[condition])
        return _evaluate(branch, assigned)
    return value.func(*(_evaluate(part, assigned) for part in value.args)) if value.args else value


# -- dtypes


def _each_constant(value: Expression, convert: Callable[[Any], Any]) -> Expression:
    """A selected constant with each of the constants converted."""
    conditions: dict[Any, sympy.Symbol] = {}
    _collect_conditions(value, conditions)
    if len(conditions) > _MOST_CONDITIONS:
        raise TooManyConditions(f"a choice by more than {_MOST_CONDITIONS} conditions")
    is_changed = False

    def chosen(left: list[Any], assigned: dict[Any, bool]) -> Any:
        nonlocal is_changed
        if left:
            first, *others = left
            return select(first, *(chosen(others, {**assigned, first: truth}) for truth in (True, False)))
        before = _evaluate(value, assigned)
        after = convert(before)
        is_changed = is_changed or before != after
        return after

    found = chosen(list(conditions), {})
    return found if is_changed else value


def of_dtype(value: Expression, dtype: torch.dtype, largest: Mapping[str, int] | None = None) -> Expression:
    """What a conversion to ``dtype`` gives. ``largest``: of leaves, by name.

    Raises:
        NotAView: it may be rounded, or wrapped around.
    """
    if dtype == torch.bool:
        return as_boolean(value)
    value = as_number(value)
    if is_selected_constant(value):
        if not value.has(sympy.Piecewise, sympy.Float, sympy.oo, sympy.nan) and value.is_Integer and abs(value) < 128:
            return value
        return _each_constant(value, lambda number: _constant_of(number, dtype))
    if dtype.is_floating_point or dtype.is_complex:
        raise NotAView(f"values in {dtype}")
    if value.is_integer is not True:
        raise NotAView("rounding to an integer")
    if not dtype.is_signed or magnitude(value, largest or {}) > torch.iinfo(dtype).max:
        raise NotAView(f"integers that may not fit into {dtype}")
    return value


def _constant_of(number: Any, dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return _rounded(number, dtype)
    if dtype.is_complex or number in (sympy.oo, -sympy.oo) or number is sympy.nan:
        raise NotAView(f"{number} in {dtype}")
    whole = int(number)
    if not torch.iinfo(dtype).min <= whole <= torch.iinfo(dtype).max:
        raise NotAView(f"{number} does not fit into {dtype}")
    return sympy.Integer(whole)


def _rounded(number: Any, dtype: torch.dtype) -> Any:
    if number in (sympy.oo, -sympy.oo) or number is sympy.nan or number.is_zero:
        return number
    found = torch.tensor(float(number), dtype=torch.float64).to(dtype).item()
    if found in (float("inf"), float("-inf")):
        return sympy.oo if found > 0 else -sympy.oo
    return sympy.Integer(int(found)) if float(found).is_integer() else sympy.Float(found, 17)


def magnitude(value: Any, largest: Mapping[str, int]) -> Any:
    """A bound of the absolute value of an expression of indices and leaves; infinity if there is none."""
    if value.is_number:
        return abs(value)
    if isinstance(value, sympy.Symbol):
        return _PLACES
    if isinstance(value, AppliedUndef):
        return largest.get(value.func.__name__, LARGEST[torch.int64])
    parts = [magnitude(part, largest) for part in value.args if not is_boolean(part)] if value.args else []
    if isinstance(value, sympy.Add):
        return sum(parts)
    if isinstance(value, sympy.Mul):
        return sympy.prod(parts)
    if isinstance(value, sympy.Abs):
        return parts[0]
    if isinstance(value, sympy.floor):
        return parts[0] + 1
    if isinstance(value, sympy.Mod):
        return parts[1]
    if isinstance(value, sympy.Piecewise):
        return max(magnitude(branch, largest) for branch, _ in value.args)
    return sympy.oo
