"""What operators make of the elements of their operands, as expressions.

A reader takes an operator with the arguments of its schema, and gives element ``index`` of its result, or raises
:class:`NotAView` for a form of the operator that it does not understand: the result is an unknown tensor then.
"""

from __future__ import annotations

from collections.abc import Callable
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


_Reader = Callable[["ElementReader", Call, Value, Index], Expression]
"""The value is what the call gives."""


def is_non_negative(value: Any, operators: Operators) -> bool:
    """Booleans, and integers that were booleans."""
    while operators.is_tensor(value):
        dtype = operators.meta(value).dtype
        if dtype == torch.bool:
            return True
        if dtype.is_floating_point or dtype.is_complex:
            return False
        passed, call = operators.passed(value), operators.does(value)
        if passed is not None:
            value = passed
        elif call is not None and call.operator in CONVERSIONS:
            value = call.arguments["self"]
        else:
            return False
    return False


def largest_of(value: Value, operators: Operators) -> int:
    """What elements of a leaf are taken to be at most, in magnitude: what counts or searches is less than a size."""
    call = operators.does(value)
    counts = call is not None and call.operator in (aten.searchsorted, aten.bucketize)
    if call is not None and call.operator is aten.cumsum:
        counts = is_non_negative(call.arguments["self"], operators)
    largest = LARGEST.get(operators.meta(value).dtype, 0)
    return min(largest, LARGEST[torch.int32]) if counts else largest


def _converted(reader: ElementReader, value: Expression, dtype: torch.dtype) -> Expression:
    return of_dtype(value, dtype, reader.largest)


def _in_one_dtype(reader: ElementReader, *operands: tuple[Any, Expression]) -> list[Expression]:
    """Operands as torch promotes them, each with its expression."""
    stand_ins = []
    for operand, _ in operands:
        if isinstance(operand, Value):
            meta = reader.operators.meta(operand)
            operand = torch.empty((1,) * meta.rank, dtype=meta.dtype, device="meta")
        elif isinstance(operand, sympy.Basic):
            operand = 0.0 if operand.is_integer is not True else 0
        stand_ins.append(operand)
    dtype = torch.result_type(*stand_ins)
    return [
        expression
        if isinstance(operand, Value) and reader.dtype(operand) == dtype
        else _converted(reader, expression, dtype)
        for operand, expression in operands
    ]


def _operands(reader: ElementReader, call: Call, index: Index) -> list[Expression]:
    """``self`` and ``other`` of an operator, as it promotes them."""
    pair = [call.arguments["self"], call.arguments["other"]]
    return _in_one_dtype(reader, *((operand, reader.operand(operand, index)) for operand in pair))


def _arange(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    start, step = (number_of(call.arguments.get(name, default)) for name, default in (("start", 0), ("step", 1)))
    if reader.dtype(value) not in INDEX_DTYPES or not (start.is_integer and step.is_integer):
        raise NotAView("arange of another dtype")
    return start + step * index[0]


def _constant(number: int) -> _Reader:
    def read(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
        return of_dtype(sympy.Integer(number), reader.dtype(value))

    return read


def _filled(name: str) -> _Reader:
    def read(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
        if isinstance(call.arguments[name], Value):
            raise NotAView("filled with a tensor's value")
        return of_dtype(number_of(call.arguments[name]), reader.dtype(value))

    return read


def _logical(combine: Callable[..., Any], of_bits: bool) -> _Reader:
    def read(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
        if of_bits and reader.dtype(value) != torch.bool:
            raise NotAView("bits of integers")
        operands = (reader.operand(call.arguments[name], index) for name in ("self", "other"))
        return combine(*map(as_boolean, operands))

    return read


def _not(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    if reader.dtype(value) != torch.bool:
        raise NotAView("bits of integers")
    return sympy.Not(as_boolean(reader.operand(call.arguments["self"], index)))


def _comparison(compare: Callable[..., Any], test: Callable[[Any], bool]) -> _Reader:
    def read(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
        first, second = map(as_number, _operands(reader, call, index))
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
    def read(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
        dtype = reader.dtype(value)
        if dtype == torch.bool:
            raise NotAView("arithmetic of booleans")
        first, second = map(as_number, _operands(reader, call, index))
        # Sympy cancels infinities that make NaN, and so do elements that nothing is known of.
        if may_be_nan(first) or may_be_nan(second):
            raise NotAView("arithmetic of floats")
        if first.has(sympy.oo, -sympy.oo, sympy.nan) or second.has(sympy.oo, -sympy.oo, sympy.nan):
            first, second = (_kept_apart(each) for each in (first, second))
        return _converted(reader, combine(first, second), dtype)

    return read


def _kept_apart(value: Expression) -> Expression:
    if not value.is_number:
        raise NotAView("arithmetic with infinity")
    return value


def _sum(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    """Masks that are added to each other: choices between numbers, which may be infinite."""
    dtype = reader.dtype(value)
    if dtype.is_floating_point and call.arguments["alpha"] == 1:
        first, second = map(as_number, _operands(reader, call, index))
        if is_selected_constant(first) and is_selected_constant(second):
            return _converted(reader, sympy.Add(first, second, evaluate=False), dtype)
    alpha = number_of(call.arguments["alpha"])
    return _arithmetic(lambda a, b: a + alpha * b)(reader, call, value, index)


def _multiply(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    dtype = reader.dtype(value)
    first, second = (reader.operand(call.arguments[name], index) for name in ("self", "other"))
    if dtype == torch.bool:
        return sympy.And(as_boolean(first), as_boolean(second))
    if dtype.is_floating_point:
        first, second = map(as_number, _operands(reader, call, index))
        if is_selected_constant(first) and is_selected_constant(second):
            return _converted(reader, sympy.Mul(first, second, evaluate=False), dtype)
    return _arithmetic(lambda a, b: a * b)(reader, call, value, index)


def _divide(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    is_floored = call.operator is aten.floor_divide or call.arguments.get("rounding_mode") == "floor"
    first, second = map(as_number, _operands(reader, call, index))
    if not is_floored or reader.dtype(value) not in INDEX_DTYPES or not second.is_positive:
        raise NotAView("a division")
    return _converted(reader, sympy.floor(first / second), reader.dtype(value))


def _unary(combine: Callable[[Any], Any]) -> _Reader:
    def read(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
        operand = reader.operand(call.arguments["self"], index)
        return _converted(reader, combine(as_number(operand)), reader.dtype(value))

    return read


def _convert(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    return _converted(reader, reader.operand(call.arguments["self"], index), reader.dtype(value))


def _where(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    if "other" not in call.arguments:
        raise NotAView("where of one operand")
    condition = as_boolean(reader.operand(call.arguments["condition"], index))
    chosen = (reader.operand(call.arguments[name], index) for name in ("self", "other"))
    return _selected(reader, value, condition, *chosen)


def _selected(
    reader: ElementReader, value: Value, condition: Any, if_true: Expression, if_false: Expression
) -> Expression:
    dtype = reader.dtype(value)
    if dtype == torch.bool:
        if_true, if_false = as_boolean(if_true), as_boolean(if_false)
        return sympy.Or(sympy.And(condition, if_true), sympy.And(sympy.Not(condition), if_false))
    return _converted(reader, select(condition, as_number(if_true), as_number(if_false)), dtype)


def _one_hot(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    return as_number(sympy.Eq(as_number(reader.operand(call.arguments["self"], index[:-1])), index[-1]))


def _triangle(keeps: Callable[[Any, Any, Any], Any]) -> _Reader:
    def read(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
        kept = keeps(index[-2], index[-1], number_of(call.arguments["diagonal"]))
        zero = sympy.false if reader.dtype(value) == torch.bool else sympy.Integer(0)
        return _selected(reader, value, kept, reader.operand(call.arguments["self"], index), zero)

    return read


def _difference(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    """``torch.diff`` with nothing, or one element, in front."""
    source, before = call.arguments["self"], call.arguments["prepend"]
    dim, dtype = call.arguments["dim"] % len(index), reader.dtype(value)
    if call.arguments["n"] != 1 or call.arguments["append"] is not None or dtype not in INDEX_DTYPES:
        raise NotAView("another form of diff")

    def at(value: Value, where: Any) -> Any:
        element = as_number(reader.read(value, (*index[:dim], sympy.sympify(where), *index[dim + 1 :])))
        return _converted(reader, element, dtype)

    here = index[dim]
    if before is None:
        return _converted(reader, at(source, here + 1) - at(source, here), dtype)
    if reader.shape(before)[dim] != 1:
        raise NotAView("diff with more than one element in front")
    first = _converted(reader, at(source, 0) - at(before, 0), dtype)
    if here.is_zero:
        return first
    step = _converted(reader, at(source, here) - at(source, here - 1), dtype)
    return step if here.is_positive else select(sympy.Eq(here, 0), first, step)


def _cumsum(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    """Nothing but zeros adds up to zero; any other sum stays a leaf."""
    if not index:
        raise NotAView("a sum of one number")
    dim = call.arguments["dim"] % len(index)
    anywhere = sympy.Dummy("anywhere", integer=True, nonnegative=True)
    if as_number(reader.operand(call.arguments["self"], (*index[:dim], anywhere, *index[dim + 1 :]))) != 0:
        raise NotAView("a sum")
    return sympy.Integer(0)


def _gather(reader: ElementReader, call: Call, value: Value, index: Index) -> Expression:
    """``x[i, j, ...]`` with integer index tensors for the first dimensions."""
    source, items = call.arguments["self"], call.arguments["indices"]
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
