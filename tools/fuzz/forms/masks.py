"""Ways to write the causal mask: expressions for ``[T, T]``, bool where a key is visible, or numbers that are added."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def set_to(tensor: Tensor, index: Any, value: float) -> Tensor:
    """Written in place, in a copy."""
    tensor = tensor.clone()
    tensor[index if isinstance(index, tuple) else (..., index)] = value
    return tensor


HELPERS = {"set_to": set_to}

ROW, COLUMN = "torch.arange(T)", "torch.arange(T)[:, None]"
ONES = "torch.ones(T, T, dtype=torch.bool)"

CAUSAL = {
    "ge": f"{COLUMN} >= {ROW}",
    "le": f"{ROW} <= {COLUMN}",
    "gt of the next": f"{COLUMN} + 1 > {ROW}",
    "ge as a function": f"torch.ge({COLUMN}, {ROW})",
    "greater_equal": f"torch.greater_equal({COLUMN}, {ROW})",
    "less_equal as a method": f"{ROW}.less_equal({COLUMN})",
    "not gt": f"~({ROW} > {COLUMN})",
    "logical_not": f"torch.logical_not(torch.lt({COLUMN}, {ROW}))",
    "== False": f"({ROW} > {COLUMN}) == False",
    "!= True": f"({ROW} > {COLUMN}) != True",
    "xor": f"({ROW} > {COLUMN}) ^ True",
    "1 - mask": f"(1 - ({ROW} > {COLUMN}).int()).bool()",
    "a difference": f"({COLUMN} - {ROW}) >= 0",
    "a difference, turned": f"torch.sub({ROW}, {COLUMN}) < 1",
    "a negative difference": f"(-({COLUMN} - {ROW})) <= 0",
    "rsub": f"torch.rsub({ROW}, {COLUMN}) >= 0",
    "the sign of a difference": f"torch.sign({COLUMN} - {ROW}) >= 0",
    "a clamped difference": f"({ROW} - {COLUMN}).clamp(min=0) == 0",
    "a maximum": f"torch.maximum({ROW}, {COLUMN}) == {COLUMN}",
    "gt or eq": f"({COLUMN} > {ROW}) | ({COLUMN} == {ROW})",
    "logical_or": f"torch.logical_or({COLUMN} > {ROW}, torch.eq({COLUMN}, {ROW}))",
    "with a mask of all": f"({COLUMN} >= {ROW}) & {ONES}",
    "unsqueeze": "torch.arange(T).unsqueeze(-1) >= torch.arange(T).unsqueeze(0)",
    "view and reshape": "torch.arange(T).view(-1, 1) >= torch.arange(T).reshape(1, T)",
    "expand": "torch.arange(T)[:, None].expand(T, T) >= torch.arange(T).expand(T, T)",
    "repeat": "torch.arange(T).repeat(T, 1).T >= torch.arange(T).repeat(T, 1)",
    "repeat_interleave": f"torch.arange(T).repeat_interleave(T).view(T, T) >= {ROW}",
    "a transposed comparison": f"({COLUMN} <= {ROW}).T",
    "movedim": f"torch.movedim({COLUMN} <= {ROW}, 0, 1)",
    "swapaxes": f"({COLUMN} <= {ROW}).swapaxes(0, 1)",
    "permute": f"({COLUMN} <= {ROW}).permute(1, 0)",
    "meshgrid": "(lambda q, k: q >= k)(*torch.meshgrid(torch.arange(T), torch.arange(T), indexing='ij'))",
    "broadcast_tensors": f"(lambda q, k: q >= k)(*torch.broadcast_tensors({COLUMN}, {ROW}))",
    "outer": "torch.outer(torch.arange(T), torch.ones(T, dtype=torch.int64)) >= torch.arange(T)",
    "counted": "torch.ones(T, dtype=torch.int64).cumsum(0)[:, None] >= torch.ones(T, dtype=torch.int64).cumsum(0)",
    "int32 and float": "torch.arange(T, dtype=torch.int32)[:, None] >= torch.arange(T).float()",
    "from the end": "torch.arange(T).flip(0)[:, None] <= torch.arange(T).flip(0)",
    "tril": f"{ONES}.tril()",
    "tril of a function": f"torch.tril({ONES})",
    "tril of numbers": "torch.tril(torch.ones(T, T)) == 1",
    "tril, greater than zero": "torch.tril(torch.ones(T, T)) > 0",
    "tril, converted": "torch.ones(T, T).tril().to(torch.bool)",
    "tril, type": "torch.ones(T, T).tril().type(torch.bool)",
    "tril of full": "torch.full((T, T), True).tril(diagonal=0)",
    "not triu": f"~{ONES}.triu(1)",
    "triu of numbers": "torch.triu(torch.ones(T, T), diagonal=1) == 0",
    "triu, transposed": f"{ONES}.triu().t()",
    "tril_indices": "set_to(torch.zeros(T, T, dtype=torch.bool), tuple(torch.tril_indices(T, T)), True)",
    "eye, counted": "torch.eye(T).cumsum(0).T.flip(0).flip(1) > 0",
    "stacked rows": "torch.stack([torch.arange(T) <= i for i in range(T)])",
    "where": f"torch.where({COLUMN} >= {ROW}, True, False)",
    "vmap": f"torch.vmap(lambda q: torch.vmap(lambda k: q >= k)({ROW}))({ROW})",
    "a column of heads": f"({COLUMN} >= {ROW})[None, None]",
}
"""Of booleans."""

ADDED = {
    "where": f"torch.where({COLUMN} >= {ROW}, 0.0, -inf).to(dtype)",
    "where, the other way": f"torch.where({COLUMN} < {ROW}, -inf, 0.0).to(dtype)",
    "masked_fill": f"torch.zeros(T, T, dtype=dtype).masked_fill({COLUMN} < {ROW}, -inf)",
    "masked_fill in place": f"torch.zeros(T, T, dtype=dtype).masked_fill_({COLUMN} < {ROW}, -inf)",
    "triu of minus infinity": "torch.full((T, T), -inf, dtype=dtype).triu(1)",
    "triu as a function": "torch.triu(torch.ones(T, T, dtype=dtype) * -inf, diagonal=1)",
    "the least number": "torch.full((T, T), torch.finfo(dtype).min, dtype=dtype).triu(diagonal=1)",
    "times the least number": f"({COLUMN} < {ROW}).to(dtype) * torch.finfo(dtype).min",
    "one less the mask": f"(1.0 - ({COLUMN} >= {ROW}).to(dtype)) * -1e30",
    "log of the mask": f"({COLUMN} >= {ROW}).to(dtype).log()",
    "written by an index": f"set_to(torch.zeros(T, T, dtype=dtype), {COLUMN} < {ROW}, -inf)",
    "the least number times a triangle": "torch.finfo(dtype).min * torch.triu(torch.ones(T, T, dtype=dtype), 1)",
}
"""Of numbers."""


_SETUP = """
def fn(T, dtype):
    return """


def program(text: str) -> Callable[..., Tensor]:
    """A function of ``T, dtype`` that returns ``text``."""
    names: dict[str, Any] = {"torch": torch, "F": F, "inf": math.inf, **HELPERS}
    exec(_SETUP + text, names)
    return names["fn"]
