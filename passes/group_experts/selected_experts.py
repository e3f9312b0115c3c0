"""What is known of the experts that a token selects. Read from data flow; changes nothing."""

from __future__ import annotations

from typing import Any

import torch

from glue_compiler.fx.operators import Operators, Value
from glue_compiler.passes.group_experts.copies import COPIES, SAME_ELEMENTS

_INDICES = (torch.int32, torch.int64)


def are_distinct(operators: Operators, selected: Value) -> bool:
    """Does each row of ``selected``, ``[tokens, slots]`` or ``[tokens]``, name an expert at most once?

    It does if there is one slot, or if the rows are those of the indices of ``topk`` along its last dimension.
    """
    shape = operators.meta(selected).shape
    if len(shape) == 1 or _is_known(shape[-1], 1):
        return True
    value: Any = selected
    while isinstance(value, Value) and _has_rows_of(operators, value, shape):
        call = operators.does(value)
        if call is None:
            return False
        if call.operator is torch.ops.aten.topk:
            rank = operators.meta(value).rank
            return value.leaf == 1 and call.arguments["dim"] in (-1, rank - 1)
        if call.operator not in COPIES and call.overload not in SAME_ELEMENTS:
            return False
        value = call.arguments["self"]
    return False


def _has_rows_of(operators: Operators, value: Value, shape: tuple[Any, ...]) -> bool:
    """Rows of the same length, in a dtype that holds every index: then it has the same rows."""
    meta = operators.meta(value)
    if meta.dtype not in _INDICES or not meta.shape:
        return False
    return isinstance(shape[-1], int) and _is_known(meta.shape[-1], shape[-1])


def _is_known(size: Any, wanted: int) -> bool:
    return type(size) is int and size == wanted
