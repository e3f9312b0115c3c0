"""Elements of captured tensors as sympy expressions of their indices.

:meth:`IndexReader.read` follows a value back through views, comparisons, arithmetic and selections, to ``arange`` (its
own index), constants, and elements of tensors that it does not look into (leaves). ``mask[b, h, q, k]`` becomes, say,
``(k <= q) & (value7(b, q) == value7(b, k))``. What each operator means is in
:mod:`glue_compiler.fx.index_operators`, and how numbers are kept in dtypes in :mod:`glue_compiler.fx.index_numbers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import sympy
import torch

from glue_compiler.fx.index_numbers import Expression
from glue_compiler.fx.index_operators import READERS, Reading, largest_of
from glue_compiler.fx.index_views import Element, Index, NotAView, broadcast_index, number_of, source_of
from glue_compiler.fx.operators import UNTRACKED, Operators, Value


class Unreadable(Exception):
    """An element has no expression that holds: its memory is written in unknown ways, or it is no plain tensor."""


class IndexReader:
    """Reads values of one numbered graph and of the bodies in it.

    Attributes:
        rules: what operators make of their operands' elements.
        in_body: is a value that is passed into a body one of the body's, not of the caller?
        leaves: the value behind each leaf's name. Leaves of one name are equal values, wherever they are computed.
        largest: what their elements are at most, in magnitude.
    """

    rules: ClassVar[Mapping[Any, Any]] = READERS
    in_body: ClassVar[bool] = False

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self.leaves: dict[str, Value] = {}
        self.largest: dict[str, int] = {}
        self._seen: dict[tuple[Value, Index], Expression] = {}

    def read(self, value: Value, index: Index) -> Expression:
        """Element ``index`` of ``value``.

        Raises:
            Unreadable: nothing is known of the element.
        """
        key = (value, index)
        if key not in self._seen:
            self.require_known(value)
            self._seen[key] = self.element(value, broadcast_index(index, self.shape(value)))
        return self._seen[key]

    def source(self, value: Value, index: Index) -> Element:
        """The element behind views and copies: of the first operator that computes something."""
        element = Element(value, broadcast_index(index, self.shape(value)))
        self.require_known(value)
        while (behind := self.behind(element)) is not None:
            element = behind
            self.require_known(element.value)
        return element

    def behind(self, element: Element) -> Element | None:
        """The element that it is a view or a copy of, or that the caller of a body passes."""
        passed = self.operators.passed(element.value)
        if passed is not None:
            return Element(passed, element.index) if not self.in_body else None
        try:
            return source_of(self.operators, element.value, element.index)
        except NotAView:
            return None

    def element(self, value: Value, index: Index) -> Expression:
        """Element ``index`` of ``value``, which is known."""
        element = self.source(value, index)
        value, index = element.value, element.index
        call = self.operators.does(value)
        read = self.rules.get(call.operator) if call is not None else None
        if call is not None and read is not None:
            try:
                return read(Reading(self, call, value, index))
            except NotAView:
                pass  # another form of the operator: an unknown tensor, which is right as well
        return self.leaf(value, index)

    def leaf(self, value: Value, index: Index) -> Expression:
        """An element that is not looked into."""
        dtype = self.dtype(value)
        if dtype.is_complex:
            raise Unreadable("complex numbers decide")
        number = self.operators.number(value)
        name = "value" + "_".join(map(str, number if isinstance(number, tuple) else (number,)))
        if name not in self.leaves:
            self.leaves[name], self.largest[name] = value, largest_of(value, self.operators)
        if dtype == torch.bool:
            return sympy.Ne(sympy.Function(name, integer=True)(*index), 0)
        kind = {"real": True} if dtype.is_floating_point else {"integer": True}
        return sympy.Function(name, **kind)(*index)

    def operand(self, value: Any, index: Index) -> Expression:
        """A tensor that is broadcast to a result, at element ``index`` of the result; or a number."""
        if isinstance(value, Value):
            self.require_known(value)
            return self.read(value, broadcast_index(index, self.shape(value)))
        return number_of(value)

    def shape(self, value: Value) -> tuple[Any, ...]:
        """Sizes as ints and sympy expressions."""
        return self.operators.shape(value)

    def dtype(self, value: Value) -> torch.dtype:
        return self.operators.dtype(value)

    def require_known(self, value: Value) -> None:
        """Raises Unreadable for what is written in unknown ways, or no plain tensor."""
        name = value.node.name
        if value.step == UNTRACKED:
            raise Unreadable(f"the memory that '{name}' reads is written in place, in a way that is not followed")
        if not self.operators.is_tensor(value):
            raise Unreadable(f"'{name}' is not a plain tensor")
