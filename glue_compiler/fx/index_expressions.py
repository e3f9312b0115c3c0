"""Elements of captured tensors as sympy expressions of their indices.

:meth:`IndexReader.read` follows a tensor back through views, comparisons, arithmetic and selections, to ``arange`` (its
own index), constants, and elements of tensors that it does not look into (leaves). ``mask[b, h, q, k]`` becomes, say,
``(k <= q) & (value7(b, q) == value7(b, k))``. Integers are taken as unbounded: an overflow on purpose is not modelled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.effects import Kind
from glue_compiler.fx.index_views import (
    Element,
    Index,
    NotAView,
    argument,
    broadcast_index,
    number_of,
    operator_name,
    shape_of,
    source_of,
)
from glue_compiler.fx.value_numbering import Numbering
from glue_compiler.fx.values import is_plain, storages_of, value_of

Expression = Any
"""A sympy number, or a sympy boolean for tensors of bool."""

_INDEX_DTYPES = (torch.int32, torch.int64)
_MOST_CONDITIONS = 6


class Unreadable(Exception):
    """An element has no expression that holds for the whole graph: its memory is written, or it is no plain tensor."""


class IndexReader:
    """Reads tensors of one numbered graph and of the bodies in it.

    Attributes:
        leaves: the node behind each leaf's name. Leaves of one name are equal values, wherever they are computed.
    """

    def __init__(self, numbering: Numbering) -> None:
        self.numbering = numbering
        self.leaves: dict[str, fx.Node] = {}
        self._seen: dict[tuple[fx.Node, Index], Expression] = {}
        self._operands: dict[fx.Node, fx.Node] = {}
        for scope in numbering.scopes:
            if scope.call is not None:
                pairs = zip(scope.call.placeholders, scope.call.operands, strict=True)
                self._operands |= {inner: outer for inner, outer in pairs if isinstance(outer, fx.Node)}

    def read(self, node: fx.Node, index: Index) -> Expression:
        """Element ``index`` of ``node``.

        Raises:
            Unreadable: nothing is known of the element.
        """
        key = (node, index)
        if key not in self._seen:
            self._seen[key] = self._read(node, broadcast_index(index, shape_of(node)))
        return self._seen[key]

    def source(self, node: fx.Node, index: Index) -> Element:
        """The element behind views and copies: the first operator that computes something."""
        element = Element(node, broadcast_index(index, shape_of(node)))
        while True:
            node = element.node
            if node in self._operands:
                element = Element(self._operands[node], element.index)
                continue
            if not self.is_pure(node):
                return element
            try:
                element = source_of(node, element.index)
            except NotAView:
                return element

    def _read(self, node: fx.Node, index: Index) -> Expression:
        element = self.source(node, index)
        node, index = element.node, element.index
        self._require_fixed(node)
        name = operator_name(node) if self.is_pure(node) else ""
        if name in _READ:
            try:
                return _READ[name](self, node, index)
            except NotAView:
                pass  # another form of the operator: an unknown tensor, which is right as well
        return self.leaf(node, index)

    def leaf(self, node: fx.Node, index: Index) -> Expression:
        """An element that is not looked into."""
        dtype = value_of(node).dtype
        name = f"value{self.numbering.numbers[node]}"
        self.leaves.setdefault(name, node)
        if dtype == torch.bool:
            return sympy.Ne(sympy.Function(name, integer=True)(*index), 0)
        kind = {"real": True} if dtype.is_floating_point else {"integer": True}
        return sympy.Function(name, **kind)(*index)

    def operand(self, value: Any, index: Index) -> Expression:
        """A tensor that is broadcast to a result, at element ``index`` of the result; or a number."""
        if isinstance(value, fx.Node) and isinstance(value_of(value), torch.Tensor):
            return self.read(value, broadcast_index(index, shape_of(value)))
        return number_of(value)

    def is_pure(self, node: fx.Node) -> bool:
        """Is the node an operator of torch's own whose result nothing changes afterwards?"""
        effects = self.numbering.effects.get(node)
        if effects is None or effects.kind is not Kind.PURE or not node.op.startswith("call_"):
            return False
        return self.is_fixed(node)

    def is_fixed(self, node: fx.Node) -> bool:
        """Is the node a plain tensor whose memory is written nowhere in the graph?"""
        value = value_of(node)
        return isinstance(value, torch.Tensor) and is_plain(value) and not storages_of(value) & self.numbering.written

    def _require_fixed(self, node: fx.Node) -> None:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or not is_plain(value):
            raise Unreadable(f"'{node.name}' is not a plain tensor")
        if storages_of(value) & self.numbering.written:
            raise Unreadable(f"the memory of '{node.name}' is written in place")


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
    return sympy.Piecewise((if_true, condition), (if_false, True), evaluate=False)


def is_selected_constant(value: Any) -> bool:
    """Is it made of constants alone, chosen by conditions?"""
    if isinstance(value, sympy.Piecewise):
        return all(is_selected_constant(branch) for branch, _ in value.args)
    if isinstance(value, sympy.Function | sympy.Symbol):
        return False
    return all(is_selected_constant(part) for part in value.args)


def holds_where(value: Any, test: Callable[[Any], bool]) -> Any:
    """For which indices a selected constant passes ``test``, as a boolean expression of the conditions in it.

    Raises:
        Unreadable: too many conditions.
    """
    conditions: dict[Any, sympy.Symbol] = {}
    _collect_conditions(value, conditions)
    if len(conditions) > _MOST_CONDITIONS:
        raise Unreadable(f"a choice by more than {_MOST_CONDITIONS} conditions")
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


# -- operators: (reader, node, index) → expression; NotAView leaves the node a leaf

_Reader = Callable[[IndexReader, fx.Node, Index], Expression]


def _dtype(node: fx.Node) -> torch.dtype:
    return value_of(node).dtype


def _operands(reader: IndexReader, node: fx.Node, index: Index) -> tuple[Expression, Expression]:
    first, second = argument(node, 0, "input"), argument(node, 1, "other")
    return reader.operand(first, index), reader.operand(second, index)


def _arange(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
    if _dtype(node) not in _INDEX_DTYPES or "end" in node.kwargs or "start" in node.kwargs:
        raise NotAView("arange of another dtype or form")
    start = number_of(node.args[0]) if len(node.args) > 1 else sympy.Integer(0)
    step = number_of(node.args[2] if len(node.args) > 2 else node.kwargs.get("step", 1))
    return start + step * index[0]


def _constant(value: Any) -> _Reader:
    def read(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
        return _of_dtype(number_of(value), _dtype(node))

    return read


def _filled(position: int) -> _Reader:
    def read(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
        filling = argument(node, position, "fill_value")
        if isinstance(filling, fx.Node) and isinstance(value_of(filling), torch.Tensor):
            raise NotAView("filled with a tensor's value")
        return _of_dtype(number_of(filling), _dtype(node))

    return read


def _of_dtype(value: Expression, dtype: torch.dtype) -> Expression:
    """What a conversion to ``dtype`` gives."""
    if dtype == torch.bool:
        return as_boolean(value)
    value = as_number(value)
    if not dtype.is_floating_point and dtype not in _INDEX_DTYPES:
        raise NotAView(f"arithmetic in {dtype}")
    # Integers that are not constants may not be representable.
    if dtype.is_floating_point and not is_selected_constant(value):
        raise NotAView(f"values in {dtype}")
    if not dtype.is_floating_point and value.is_integer is not True:
        raise NotAView("rounding to an integer")
    return value


def _logical(combine: Callable[..., Any]) -> _Reader:
    def read(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
        operands = _operands(reader, node, index)
        if _dtype(node) != torch.bool:
            raise NotAView("bits of integers")
        return combine(*map(as_boolean, operands))

    return read


def _not(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
    if _dtype(node) != torch.bool:
        raise NotAView("bits of integers")
    return sympy.Not(as_boolean(reader.operand(node.args[0], index)))


def _comparison(compare: Callable[..., Any], test: Callable[[Any], bool]) -> _Reader:
    def read(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
        first, second = map(as_number, _operands(reader, node, index))
        difference = first - second
        if difference.has(sympy.oo, -sympy.oo, sympy.nan):
            raise NotAView("a comparison with infinity")
        if is_selected_constant(difference):
            return holds_where(difference, lambda number: bool(test(number)))
        # A float may be NaN, of which no comparison's negation holds.
        if not (first.is_integer and second.is_integer):
            raise NotAView("a comparison of floats")
        return compare(first, second)

    return read


def _arithmetic(combine: Callable[..., Any]) -> _Reader:
    def read(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
        if node.kwargs.get("alpha", 1) != 1 or _dtype(node) == torch.bool:
            raise NotAView("another form of arithmetic")
        return _of_dtype(combine(*map(as_number, _operands(reader, node, index))), _dtype(node))

    return read


def _multiply(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
    if _dtype(node) == torch.bool:
        return sympy.And(*map(as_boolean, _operands(reader, node, index)))
    return _arithmetic(lambda a, b: a * b)(reader, node, index)


def _floor_divide(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
    first, second = map(as_number, _operands(reader, node, index))
    if _dtype(node) not in _INDEX_DTYPES or not second.is_positive or "rounding_mode" in node.kwargs:
        raise NotAView("a division")
    return sympy.floor(first / second)


def _unary(combine: Callable[[Any], Any]) -> _Reader:
    def read(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
        value = reader.operand(node.args[0], index)
        return _of_dtype(combine(as_number(value)), _dtype(node))

    return read


def _convert(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
    return _of_dtype(reader.operand(node.args[0], index), _dtype(node))


def _where(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
    if len(node.args) != 3:
        raise NotAView("where of one operand")
    condition = as_boolean(reader.operand(node.args[0], index))
    return _selected(node, condition, *(reader.operand(value, index) for value in node.args[1:]))


def _masked_fill(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
    condition = as_boolean(reader.operand(argument(node, 1, "mask"), index))
    filling, kept = reader.operand(argument(node, 2, "value"), index), reader.operand(node.args[0], index)
    return _selected(node, condition, filling, kept)


def _selected(node: fx.Node, condition: Any, if_true: Expression, if_false: Expression) -> Expression:
    if _dtype(node) == torch.bool:
        if_true, if_false = as_boolean(if_true), as_boolean(if_false)
        return sympy.Or(sympy.And(condition, if_true), sympy.And(sympy.Not(condition), if_false))
    return _of_dtype(select(condition, as_number(if_true), as_number(if_false)), _dtype(node))


def _triangle(keeps: Callable[[Any, Any, Any], Any]) -> _Reader:
    def read(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
        diagonal = number_of(argument(node, 1, "diagonal", 0))
        kept = keeps(index[-2], index[-1], diagonal)
        zero = sympy.false if _dtype(node) == torch.bool else sympy.Integer(0)
        return _selected(node, kept, reader.operand(node.args[0], index), zero)

    return read


def _difference(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
    """``torch.diff`` with nothing, or one element, in front."""
    source, before = argument(node, 0, "input"), argument(node, 3, "prepend")
    dim = argument(node, 2, "dim", -1) % len(index)
    if argument(node, 1, "n", 1) != 1 or argument(node, 4, "append") is not None or _dtype(node) not in _INDEX_DTYPES:
        raise NotAView("another form of diff")

    def at(node: fx.Node, where: Any) -> Any:
        return reader.read(node, (*index[:dim], sympy.sympify(where), *index[dim + 1 :]))

    here = index[dim]
    if before is None:
        return at(source, here + 1) - at(source, here)
    if shape_of(before)[dim] != 1:
        raise NotAView("diff with more than one element in front")
    first = at(source, 0) - at(before, 0)
    if here.is_zero:
        return first
    step = at(source, here) - at(source, here - 1)
    return step if here.is_positive else select(sympy.Eq(here, 0), first, step)


def _cumsum(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
    """Nothing but zeros adds up to zero; any other sum stays a leaf."""
    dim = argument(node, 1, "dim")
    if not isinstance(dim, int):
        raise NotAView("a sum over several dimensions")
    dim %= len(index)
    anywhere = sympy.Dummy("anywhere", integer=True, nonnegative=True)
    if as_number(reader.operand(node.args[0], (*index[:dim], anywhere, *index[dim + 1 :]))) != 0:
        raise NotAView("a sum")
    return sympy.Integer(0)


def _gather(reader: IndexReader, node: fx.Node, index: Index) -> Expression:
    """``x[i, j, ...]`` with integer index tensors for the first dimensions."""
    source, items = node.args
    items = list(items) if isinstance(items, tuple | list) else [items]
    tensors = [item for item in items if isinstance(item, fx.Node) and isinstance(value_of(item), torch.Tensor)]
    if not isinstance(source, fx.Node) or len(tensors) != len(items) or any(_dtype(t) == torch.bool for t in tensors):
        raise NotAView("indices of several kinds")
    rest = len(shape_of(source)) - len(items)
    own = index[: len(index) - rest]
    at = tuple(as_number(reader.operand(tensor, own)) for tensor in tensors)
    # A negative index would count from the end.
    if not all(i.is_nonnegative for i in at):
        raise NotAView("an index that may be negative")
    return reader.read(source, (*at, *index[len(index) - rest :]))


_READ: dict[str, _Reader] = {
    "arange": _arange,
    "zeros": _constant(0),
    "ones": _constant(1),
    "zeros_like": _constant(0),
    "ones_like": _constant(1),
    "new_zeros": _constant(0),
    "new_ones": _constant(1),
    "full": _filled(1),
    "full_like": _filled(1),
    "new_full": _filled(2),
    "scalar_tensor": _filled(0),
    "and": _logical(sympy.And),
    "logical_and": _logical(sympy.And),
    "bitwise_and": _logical(sympy.And),
    "or": _logical(sympy.Or),
    "logical_or": _logical(sympy.Or),
    "bitwise_or": _logical(sympy.Or),
    "xor": _logical(sympy.Xor),
    "invert": _not,
    "inv": _not,
    "logical_not": _not,
    "bitwise_not": _not,
    "eq": _comparison(sympy.Eq, lambda d: d == 0),
    "ne": _comparison(sympy.Ne, lambda d: d != 0),
    "le": _comparison(sympy.Le, lambda d: d <= 0),
    "lt": _comparison(sympy.Lt, lambda d: d < 0),
    "ge": _comparison(sympy.Ge, lambda d: d >= 0),
    "gt": _comparison(sympy.Gt, lambda d: d > 0),
    "add": _arithmetic(lambda a, b: a + b),
    "sub": _arithmetic(lambda a, b: a - b),
    "rsub": _arithmetic(lambda a, b: b - a),
    "mul": _multiply,
    "floordiv": _floor_divide,
    "floor_divide": _floor_divide,
    "neg": _unary(lambda a: -a),
    "abs": _unary(sympy.Abs),
    "to": _convert,
    "type": _convert,
    "type_as": _convert,
    "bool": _convert,
    "int": _convert,
    "long": _convert,
    "float": _convert,
    "double": _convert,
    "half": _convert,
    "bfloat16": _convert,
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle(lambda row, column, diagonal: column - row <= diagonal),
    "triu": _triangle(lambda row, column, diagonal: column - row >= diagonal),
    "diff": _difference,
    "cumsum": _cumsum,
    "getitem": _gather,
}
"""By :func:`~glue_compiler.fx.index_views.operator_name`."""
