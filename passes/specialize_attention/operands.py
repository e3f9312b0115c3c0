"""Query, key and value ``[B, H, T, D]`` behind the operands of products, whose rows and heads may be one dimension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.gradients import Gradients
from glue_compiler.fx.index_expressions import IndexReader, Unreadable
from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.index_views import Element, Index, NotAView, broadcast_index, reshaped_index, source_of
from glue_compiler.fx.operators import UNTRACKED, Operators, Value
from glue_compiler.passes.specialize_attention.attention_parts import NotAttention


def regrouped_from(value: Value, operators: Operators) -> Value | None:
    """Scores ``[B, H, T, S]`` of which ``value`` is the view ``[B * H, T, S]``, or the other way round; or a copy.

    None: it is no such view.
    """
    if not operators.is_tensor(value) or operators.rank(value) not in (3, 4):
        return None
    index = places(operators.rank(value))
    try:
        element = source_of(operators, value, index)
    except NotAView:
        return None
    before, after = operators.shape(element.value), operators.shape(value)
    is_regrouped = sorted((len(before), len(after))) == [3, 4] or before == after
    return element.value if is_regrouped and element.index == _same_rows(index, before, after) else None


def operand_behind(value: Value, output: fx.Node, reader: IndexReader, *, is_transposed: bool) -> Value | None:
    """The tensor ``[B, H, T, D]`` behind an operand of a product, ``[B * H, T, D]`` or ``[B, H, T, D]``.

    Args:
        is_transposed: the last two dimensions of the operand are swapped.

    Returns:
        None if there is none. Which ``B`` and ``H`` are merged, only the result says.

    Raises:
        NotAttention: gradients do not pass from the operand to the tensor.
    """
    operators = reader.operators
    shape = reader.shape(value)
    if len(shape) == 4 and not is_transposed:
        return value
    index = places(len(shape))
    element = Element(value, broadcast_index(_swapped(index) if is_transposed else index, shape))
    wanted = _swapped(shape) if is_transposed else shape
    gradients = Gradients(output, operators)
    for behind in elements_behind(element, gradients):
        found = reader.shape(behind.value)
        if behind.value != value and len(found) == 4 and behind.index == _same_rows(index, found, wanted):
            is_of_a_node = behind.value.step == UNTRACKED or operators.node_of(behind.value) is not None
            if is_of_a_node and behind.value.node.graph is output.graph:
                return behind.value
    if not gradients.pass_through(behind.value.node):
        raise NotAttention("gradients are switched off for a part of it")
    return None


def elements_behind(element: Element, gradients: Gradients) -> Iterator[Element]:
    """``element``, and those that it is a view or a copy of, as far as gradients pass through."""
    yield element
    while gradients.pass_through(element.value.node):
        try:
            element = source_of(gradients.operators, element.value, element.index)
        except NotAView:
            return
        yield element


def before_widening(value: Any, output: Value, operators: Operators) -> Any:
    """Of a tensor of the output's dtype that was converted to a wider one, which holds the same numbers, the tensor."""
    dtype, gradients = operators.dtype(output), Gradients(output.node, operators)
    while operators.is_tensor(value) and operators.dtype(value) != dtype and gradients.pass_through(value.node):
        call = operators.does(value, *CONVERSIONS)
        if call is None:
            break
        before = call.arguments["self"]
        if not operators.is_tensor(before) or operators.dtype(before) != dtype:
            break
        if torch.promote_types(dtype, operators.dtype(value)) != operators.dtype(value):
            break
        value = before
    return value


def places(rank: int) -> Index:
    """Symbols for an element of a tensor ``[B, H, T, D]`` or of fewer dimensions, the last ones of those."""
    return tuple(sympy.Symbol(name, integer=True, nonnegative=True) for name in "bhtd"[4 - rank :])


def is_zeros(value: Value, output: fx.Node, reader: IndexReader) -> bool:
    """Is every element known to be zero, and gets no gradient?"""
    if Gradients(output, reader.operators).reach(value):
        return False
    try:
        return bool(reader.read(value, places(reader.operators.rank(value))) == 0)
    except (Unreadable, NotAView):
        return False


def _same_rows(index: Index, shape: tuple[Any, ...], result: tuple[Any, ...]) -> Index | None:
    """The index into ``shape`` for element ``index`` of ``result``, if only dimensions before the last two differ."""
    try:
        return reshaped_index(index, shape, result) if shape[-2:] == result[-2:] else None
    except NotAView:
        return None


def _swapped(each: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*each[:-2], each[-1], each[-2])
