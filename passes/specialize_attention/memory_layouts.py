"""In which order the dimensions of a tensor lie in memory."""

from __future__ import annotations

import itertools
from typing import Any

import sympy
from torch import Tensor

from glue_compiler.fx.values import expressions

Layout = tuple[int, ...]
"""Dimensions from the outermost to the innermost: ``tensor.permute(layout)`` is contiguous."""


def layout_of(tensor: Tensor) -> Layout | None:
    """None: elements are left out, or lie in the same place."""
    orders: list[Layout] = list(itertools.permutations(range(tensor.dim())))
    if tensor.dim() == 4:
        orders = [(0, 1, 2, 3), (0, 2, 1, 3), *orders]
    return next((order for order in orders if has_layout(tensor, order)), None)


def has_layout(tensor: Tensor, layout: Layout) -> bool:
    """For tensors of at least one element."""
    shape, strides = (expressions(each) for each in (tensor.shape, tensor.stride()))
    step: Any = 1
    for dim in reversed(layout):
        if shape[dim] != 1 and sympy.expand(_of_elements(strides[dim]) - step) != 0:
            return False
        step = step * shape[dim]
    return True


def _of_elements(stride: Any) -> Any:
    """Without the ``max(1, size)`` that torch writes for sizes that may be 0."""
    if not isinstance(stride, sympy.Basic):
        return stride
    return stride.replace(
        lambda part: part.func.__name__ == "Max" and len(part.args) == 2 and sympy.S.One in part.args,
        lambda part: next(size for size in part.args if size != 1),
    )
