"""Reads what makes logits: products of rows with weights, added up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from glue_compiler.fx.operators import Call, Operators, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Matrix:
    """A weight ``[V, K]``; where it ``is_transposed`` the tensor holds ``[K, V]``."""

    value: Value
    is_transposed: bool = False


@dataclass(frozen=True)
class Term:
    """``scale * (rows @ weight.T + bias)``.

    Attributes:
        rows: ``[*lead, K]``.
        bias: ``[V]``, perhaps with sizes of one before that; None: there is none.
        dtype: of the product: what rows, weight and bias are converted to before it, by autocast if they differ.
        scale: None: the product is taken as it is.
    """

    rows: Value
    weight: Matrix
    bias: Value | None
    dtype: torch.dtype
    scale: float | None = None


@dataclass(frozen=True)
class Shared:
    """This rank's part of a head's classes: ``classes`` of them, from class ``first`` on. Each rank has as many."""

    first: int
    classes: int


@dataclass(frozen=True)
class Head:
    """Logits ``[*lead, V]``: the sum of terms, first to last.

    Attributes:
        value: the sum.
        inside: the values between the operands and the sum, itself included.
        shared: this rank's classes, where ranks share them; rows, weight and bias are DTensors then.
    """

    value: Value
    terms: tuple[Term, ...]
    inside: tuple[Value, ...]
    classes: int
    device: torch.device
    shared: Shared | None = None


def read_head(value: Value, operators: Operators) -> Head | None:
    """The head whose sum ``value`` is; None if it is made in another way."""
    meta = operators.meta(value)
    inside: list[Value] = []
    if not meta.dtype.is_floating_point or not meta.rank or not isinstance(meta.shape[-1], int):
        return None
    terms = _terms(value, operators, inside)
    if not terms:
        return None
    shapes = {operators.shape(term.rows)[:-1] for term in terms}
    if shapes != {meta.shape[:-1]}:
        return None
    return Head(value, tuple(terms), tuple(dict.fromkeys(inside)), meta.shape[-1], meta.device)


def _terms(value: Any, operators: Operators, inside: list[Value]) -> list[Term] | None:
    """``inside`` gets the values between the operands and ``value``."""
    if not operators.is_tensor(value) or (call := operators.does(value)) is None or call.written:
        return None
    found: list[Term] | None = None
    match call:
        case Call(aten.add, {"self": Value() as first, "other": Value() as second, "alpha": 1}):
            left, right = (_terms(each, operators, inside) for each in (first, second))
            if left and right:
                found = left + right
            elif left or right:
                found = _with_bias(left or right or [], second if left else first, operators)
        case Call(aten.mul, {"self": first, "other": second}):
            product, factor = (first, second) if isinstance(first, Value) else (second, first)
            terms = _terms(product, operators, inside) if is_factor(factor) else None
            if terms and len(terms) == 1 and terms[0].scale is None:
                found = [replace(terms[0], scale=float(factor))]
        case _:
            term = _product(value, call, operators)
            found = [term] if term is not None else None
    if found:
        inside.append(value)
    return found


def _with_bias(terms: list[Term], bias: Value, operators: Operators) -> list[Term] | None:
    """The terms with a number of each class added: ``[V]``, or with sizes of one before that."""
    *others, last = terms
    if last.bias is not None or last.scale is not None or not operators.is_tensor(bias):
        return None
    found, weight = operators.meta(bias), operators.meta(last.weight.value)
    classes = weight.shape[last.weight.is_transposed]
    if found.dtype != last.dtype or found.shape != (*(1,) * (found.rank - 1), classes):
        return None
    return [*others, replace(last, bias=bias)] if found.rank <= operators.rank(last.rows) else None


def is_factor(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value != 0


def _product(value: Value, call: Call, operators: Operators) -> Term | None:
    bias: Any = None
    match call:
        case Call(aten.linear, {"input": rows, "weight": weight, "bias": bias}):
            is_transposed = False
        case Call(aten.matmul, {"self": rows, "other": weight}):
            is_transposed = True
        case Call(aten.addmm, {"self": bias, "mat1": rows, "mat2": weight, "beta": 1, "alpha": 1}):
            is_transposed = True
        case Call(aten.einsum, {"equation": str() as equation, "tensors": (first, second)}):
            found = _einsum(equation, first, second)
            if found is None:
                return None
            rows, weight, is_transposed = found
        case _:
            return None
    if not all(operators.is_tensor(each) for each in (rows, weight)):
        return None
    if bias is not None and (not operators.is_tensor(bias) or operators.rank(bias) != 1):
        return None
    of_rows, of_weight, of_value = (operators.meta(each) for each in (rows, weight, value))
    if of_weight.rank != 2 or of_rows.rank < 1 or of_value.shape[:-1] != of_rows.shape[:-1]:
        return None
    if bias is not None and operators.shape(bias) != of_value.shape[-1:]:
        return None
    if of_rows.shape[-1] != of_weight.shape[not is_transposed]:  # einsum repeats a size of one
        return None
    if {each.device for each in (of_rows, of_weight)} != {of_value.device}:
        return None
    return Term(rows, _untransposed(Matrix(weight, is_transposed), operators), bias, of_value.dtype)


def _einsum(equation: str, first: Any, second: Any) -> tuple[Any, Any, bool] | None:
    """(rows, weight, is it ``[K, V]``?) of ``btk,vk->btv`` and the like."""
    factors, arrow, result = equation.replace(" ", "").partition("->")
    names = factors.split(",")
    if not arrow or len(names) != 2 or not (factors.replace(",", "") + result).isalpha():
        return None
    for rows, weight, of_rows, of_weight in ((first, second, *names), (second, first, *reversed(names))):
        if len(of_weight) != 2 or len(set(of_rows)) != len(of_rows) or not of_rows:
            continue
        inner, classes = of_rows[-1], result[-1:]
        if classes not in of_rows and result == of_rows[:-1] + classes and set(of_weight) == {inner, classes}:
            return rows, weight, of_weight[0] == inner
    return None


def _untransposed(matrix: Matrix, operators: Operators) -> Matrix:
    """The matrix in memory of which this one is a transposed view."""
    while operators.passes_gradients(matrix.value.node):
        match operators.does(matrix.value):
            case Call(aten.permute, {"self": source, "dims": dims}) if tuple(dim % 2 for dim in dims) == (1, 0):
                pass
            case _:
                return matrix
        if not operators.is_tensor(source) or operators.rank(source) != 2:
            return matrix
        matrix = Matrix(source, not matrix.is_transposed)
    return matrix


def operands_of(head: Head) -> Iterator[Value]:
    for term in head.terms:
        yield term.rows
        yield term.weight.value
        if term.bias is not None:
            yield term.bias
