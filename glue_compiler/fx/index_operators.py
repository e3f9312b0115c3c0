"""What operators make of the elements of their operands, as expressions.

A rule takes a :class:`Reading`, and gives the element of the operator's result, or raises :class:`NotAView` for a form
of the operator that it does not understand: the result is an unknown tensor then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch

from glue_compiler.fx.index_numbers import (
    LARGEST,
    Expression,
    as_boolean,
    as_number,
    holds_where,
    is_selected_constant,
    may_be_nan,
    of_dtype,
    select,
)
from glue_compiler.fx.index_views import Index, NotAView, number_of
from glue_compiler.fx.operators import Call, Operators, Value

aten = torch.ops.aten
INDEX_DTYPES = (torch.int32, torch.int64)


class ElementReader(Protocol):
    """Reads elements of values; :class:`glue_compiler.fx.index_expressions.IndexReader`."""

    operators: Operators
    largest: dict[str, int]

    def read(self, value: Value, index: Index) -> Expression: ...
    def operand(self, value: Any, index: Index) -> Expression: ...
    def shape(self, value: Value) -> Any: ...
    def dtype(self, value: Any) -> torch.dtype: ...


@dataclass(frozen=True)
class Reading:
    """Element ``index`` of ``value``, which ``call`` gives. ``made["dim"]`` is an argument of the call."""

    reader: ElementReader
    call: Call
    value: Value
    index: Index

    def __getitem__(self, name: str) -> Any:
        return self.call.arguments[name]

    @property
    def dtype(self) -> torch.dtype:
        return self.reader.dtype(self.value)

    def operand(self, name: str) -> Expression:
        """Of a tensor that is broadcast to the result, the element behind this one; or a number."""
        return self.reader.operand(self[name], self.index)

    def in_dtype(self, found: Expression) -> Expression:
        """As the result holds it."""
        return of_dtype(found, self.dtype, self.reader.largest)


_Reader = Callable[[Reading], Expression]


def is_non_negative(value: Any, operators: Operators) -> bool:
    """Booleans, and integers that were booleans."""
    while operators.is_tensor(value):
        dtype = operators.dtype(value)
        if dtype == torch.bool:
            return True
        if dtype.is_floating_point or dtype.is_complex:
            return False
        passed, call = operators.passed(value), operators.does(value, *CONVERSIONS)
        if passed is not None:
            value = passed
        elif call is not None:
            value = call.arguments["self"]
        else:
            return False
    return False


def largest_of(value: Value, operators: Operators) -> int:
    """What elements of a leaf are taken to be at most, in magnitude: what counts or searches is less than a size."""
    counts = operators.does(value, aten.searchsorted, aten.bucketize) is not None
    if (call := operators.does(value, aten.cumsum)) is not None:
        counts = is_non_negative(call.arguments["self"], operators)
    largest = LARGEST.get(operators.dtype(value), 0)
    return min(largest, LARGEST[torch.int32]) if counts else largest


def _operands(made: Reading) -> list[Expression]:
    """``self`` and ``other`` of an operator, as it promotes them."""
    reader, stand_ins = made.reader, []
    elements = {name: made.operand(name) for name in ("self", "other")}
    for operand in map(made.__getitem__, elements):
        if isinstance(operand, Value):
            meta = reader.operators.meta(operand)
            operand = torch.empty((1,) * meta.rank, dtype=meta.dtype, device="meta")
        elif isinstance(operand, sympy.Basic):
            operand = 0.0 if operand.is_integer is not True else 0
        stand_ins.append(operand)
    dtype = torch.result_type(*stand_ins)
    return [
        each
        if isinstance(made[name], Value) and reader.dtype(made[name]) == dtype
        else of_dtype(each, dtype, reader.largest)
        for name, each in elements.items()
    ]


def _arange(made: Reading) -> Expression:
    start, step = (number_of(made.call.arguments.get(name, default)) for name, default in (("start", 0), ("step", 1)))
    if made.dtype not in INDEX_DTYPES or not (start.is_integer and step.is_integer):
        raise NotAView("arange of another dtype")
    return start + step * made.index[0]


def _constant(number: int) -> _Reader:
    def read(made: Reading) -> Expression:
        return of_dtype(sympy.Integer(number), made.dtype)

    return read


def _filled(name: str) -> _Reader:
    def read(made: Reading) -> Expression:
        if isinstance(made[name], Value):
            raise NotAView("filled with a tensor's value")
        return of_dtype(number_of(made[name]), made.dtype)

    return read


def _logical(combine: Callable[..., Any], of_bits: bool) -> _Reader:
    def read(made: Reading) -> Expression:
        if of_bits and made.dtype != torch.bool:
            raise NotAView("bits of integers")
        operands = map(made.operand, ("self", "other"))
        return combine(*map(as_boolean, operands))

    return read


def _not(made: Reading) -> Expression:
    if made.dtype != torch.bool:
        raise NotAView("bits of integers")
    return sympy.Not(as_boolean(made.operand("self")))


def _comparison(compare: Callable[..., Any], test: Callable[[Any], bool]) -> _Reader:
    def read(made: Reading) -> Expression:
        first, second = map(as_number, _operands(made))
        if first.has(sympy.oo, -sympy.oo, sympy.nan) or second.has(sympy.oo, -sympy.oo, sympy.nan):
            raise NotAView("a comparison with infinity")
        if may_be_nan(first) or may_be_nan(second):  # sympy would take it for equal to itself
            raise NotAView("a comparison of floats")
        difference = first - second
        if is_selected_constant(difference):
            return holds_where(difference, lambda number: bool(test(number)))
        # A float may be NaN, of which no comparison's negation holds.
        if not (first.is_integer and second.is_integer):
            raise NotAView("a comparison of floats")
        return compare(first, second)

    return read


def _arithmetic(combine: Callable[..., Any]) -> _Reader:
    def read(made: Reading) -> Expression:
        dtype = made.dtype
        if dtype == torch.bool:
            raise NotAView("arithmetic of booleans")
        first, second = map(as_number, _operands(made))
        # Sympy cancels infinities that make NaN, and so do elements that nothing is known of.
        if may_be_nan(first) or may_be_nan(second):
            raise NotAView("arithmetic of floats")
        if first.has(sympy.oo, -sympy.oo, sympy.nan) or second.has(sympy.oo, -sympy.oo, sympy.nan):
            first, second = (_kept_apart(each) for each in (first, second))
        return made.in_dtype(combine(first, second))

    return read


def _kept_apart(value: Expression) -> Expression:
    if not value.is_number:
        raise NotAView("arithmetic with infinity")
    return value


def _sum(made: Reading) -> Expression:
    """Masks that are added to each other: choices between numbers, which may be infinite."""
    dtype = made.dtype
    if dtype.is_floating_point and made["alpha"] == 1:
        first, second = map(as_number, _operands(made))
        if is_selected_constant(first) and is_selected_constant(second):
            return made.in_dtype(sympy.Add(first, second, evaluate=False))
    alpha = number_of(made["alpha"])
    return _arithmetic(lambda a, b: a + alpha * b)(made)


def _multiply(made: Reading) -> Expression:
    dtype = made.dtype
    first, second = map(made.operand, ("self", "other"))
    if dtype == torch.bool:
        return sympy.And(as_boolean(first), as_boolean(second))
    if dtype.is_floating_point:
        first, second = map(as_number, _operands(made))
        if is_selected_constant(first) and is_selected_constant(second):
            return made.in_dtype(sympy.Mul(first, second, evaluate=False))
    return _arithmetic(lambda a, b: a * b)(made)


def _divide(made: Reading) -> Expression:
    is_floored = made.call.operator is aten.floor_divide or made.call.arguments.get("rounding_mode") == "floor"
    first, second = map(as_number, _operands(made))
    if not is_floored or made.dtype not in INDEX_DTYPES or not second.is_positive:
        raise NotAView("a division")
    return made.in_dtype(sympy.floor(first / second))


def _unary(combine: Callable[[Any], Any]) -> _Reader:
    def read(made: Reading) -> Expression:
        operand = made.operand("self")
        return made.in_dtype(combine(as_number(operand)))

    return read


def _convert(made: Reading) -> Expression:
    return made.in_dtype(made.operand("self"))


def _where(made: Reading) -> Expression:
    if "other" not in made.call.arguments:
        raise NotAView("where of one operand")
    condition = as_boolean(made.operand("condition"))
    chosen = map(made.operand, ("self", "other"))
    return _selected(made, condition, *chosen)


def _selected(made: Reading, condition: Any, if_true: Expression, if_false: Expression) -> Expression:
    dtype = made.dtype
    if dtype == torch.bool:
        if_true, if_false = as_boolean(if_true), as_boolean(if_false)
        return sympy.Or(sympy.And(condition, if_true), sympy.And(sympy.Not(condition), if_false))
    return made.in_dtype(select(condition, as_number(if_true), as_number(if_false)))


def _one_hot(made: Reading) -> Expression:
    return as_number(sympy.Eq(as_number(made.reader.operand(made["self"], made.index[:-1])), made.index[-1]))


def _triangle(keeps: Callable[[Any, Any, Any], Any]) -> _Reader:
    def read(made: Reading) -> Expression:
        row, column = made.index[-2:]
        kept = keeps(row, column, number_of(made["diagonal"]))
        zero = sympy.false if made.dtype == torch.bool else sympy.Integer(0)
        return _selected(made, kept, made.operand("self"), zero)

    return read


def _difference(made: Reading) -> Expression:
    """``torch.diff`` with nothing, or one element, in front."""
    source, before = made["self"], made["prepend"]
    index, reader = made.index, made.reader
    dim, dtype = made["dim"] % len(index), made.dtype
    if made["n"] != 1 or made["append"] is not None or dtype not in INDEX_DTYPES:
        raise NotAView("another form of diff")

    def at(value: Value, where: Any) -> Any:
        element = as_number(reader.read(value, (*index[:dim], sympy.sympify(where), *index[dim + 1 :])))
        return made.in_dtype(element)

    here = index[dim]
    if before is None:
        return made.in_dtype(at(source, here + 1) - at(source, here))
    if reader.shape(before)[dim] != 1:
        raise NotAView("diff with more than one element in front")
    first = made.in_dtype(at(source, 0) - at(before, 0))
    if here.is_zero:
        return first
    step = made.in_dtype(at(source, here) - at(source, here - 1))
    return step if here.is_positive else select(sympy.Eq(here, 0), first, step)


def _cumsum(made: Reading) -> Expression:
    """Nothing but zeros adds up to zero; any other sum stays a leaf."""
    index = made.index
    if not index:
        raise NotAView("a sum of one number")
    dim = made["dim"] % len(index)
    anywhere = sympy.Dummy("anywhere", integer=True, nonnegative=True)
    if as_number(made.reader.operand(made["self"], (*index[:dim], anywhere, *index[dim + 1 :]))) != 0:
        raise NotAView("a sum")
    return sympy.Integer(0)


def _gather(made: Reading) -> Expression:
    """``x[i, j, ...]`` with integer index tensors for the first dimensions."""
    source, items, index, reader = made["self"], made["indices"], made.index, made.reader
    if not all(isinstance(item, Value) and reader.dtype(item) in INDEX_DTYPES for item in items):
        raise NotAView("indices of several kinds")
    rest = len(reader.shape(source)) - len(items)
    own = index[: len(index) - rest]
    at = tuple(as_number(reader.operand(item, own)) for item in items)
    # A negative index would count from the end.
    if not all(i.is_nonnegative for i in at):
        raise NotAView("an index that may be negative")
    return reader.read(source, (*at, *index[len(index) - rest :]))


CONVERSIONS = (aten.to, aten._to_copy)

READERS: dict[Any, _Reader] = {
    aten.arange: _arange,
    aten.zeros: _constant(0),
    aten.ones: _constant(1),
    aten.zeros_like: _constant(0),
    aten.ones_like: _constant(1),
    aten.new_zeros: _constant(0),
    aten.new_ones: _constant(1),
    aten.full: _filled("fill_value"),
    aten.full_like: _filled("fill_value"),
    aten.new_full: _filled("fill_value"),
    aten.scalar_tensor: _filled("s"),
    aten.lift_fresh: _filled("self"),  # torch.tensor(number)
    aten.bitwise_and: _logical(sympy.And, True),
    aten.logical_and: _logical(sympy.And, False),
    aten.bitwise_or: _logical(sympy.Or, True),
    aten.logical_or: _logical(sympy.Or, False),
    aten.bitwise_xor: _logical(sympy.Xor, True),
    aten.logical_xor: _logical(sympy.Xor, False),
    aten.bitwise_not: _not,
    aten.logical_not: _not,
    aten.eq: _comparison(sympy.Eq, lambda d: d == 0),
    aten.ne: _comparison(sympy.Ne, lambda d: d != 0),
    aten.le: _comparison(sympy.Le, lambda d: d <= 0),
    aten.lt: _comparison(sympy.Lt, lambda d: d < 0),
    aten.ge: _comparison(sympy.Ge, lambda d: d >= 0),
    aten.gt: _comparison(sympy.Gt, lambda d: d > 0),
    aten.add: _sum,
    aten.mul: _multiply,
    aten.div: _divide,
    aten.floor_divide: _divide,
    aten.neg: _unary(lambda a: -a),
    aten.abs: _unary(sympy.Abs),
    aten.where: _where,
    aten.tril: _triangle(lambda row, column, diagonal: column - row <= diagonal),
    aten.triu: _triangle(lambda row, column, diagonal: column - row >= diagonal),
    aten.one_hot: _one_hot,
    aten.diff: _difference,
    aten.cumsum: _cumsum,
    aten.index: _gather,
    **dict.fromkeys(CONVERSIONS, _convert),
}
"""By the operator."""
