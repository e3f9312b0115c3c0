"""Rows of a batch that begin with equal tokens: each token behind an equal beginning is one for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glue_compiler.ops.composite import composite
from glue_compiler.ops.opaque import opaque

MOST_COMPARED = 2**24
"""How many numbers are compared at a time: rows are compared with all others."""


@opaque("shared_tokens")
def shared_tokens(seen: Tensor, same: list[Tensor], alone: list[Tensor]) -> list[Tensor]:
    """Which tokens an earlier row has too, behind the same tokens.

    Args:
        seen: bool ``[B, T]``: the token counts.
        same: ``[B, T, ...]`` each: the same bits for equal tokens. Hidden tokens are equal, whatever they have.
        alone: bool ``[B, T]`` each: the token is not one with others, those behind it may be.

    Returns:
        bool ``[B, T]``: the tokens that count, without those that an earlier row has too; int64 ``[B * T]``: where a
        token lies that stands for each, in the first row that agrees with its own up to there.
    """
    rows, length = seen.shape
    same = [_bits(each) if each.is_floating_point() or each.is_complex() else each for each in same]
    numbers = sum(each[:1, :1].numel() for each in same) + 1
    some = max(1, MOST_COMPARED // max(1, rows * length * numbers))
    places = torch.arange(rows * length, device=seen.device)
    first = [_first_equal(seen, same, alone, start, start + some) for start in range(0, rows, some)]
    of = (torch.cat(first or [seen.long()]) * length + torch.arange(length, device=seen.device)).flatten()
    return [seen & (of == places).view(seen.shape), of]


def _bits(numbers: Tensor) -> Tensor:
    """Zeros of either sign are equal numbers, but not the same."""
    return numbers.contiguous().unsqueeze(-1).view(torch.uint8)


def _first_equal(seen: Tensor, same: list[Tensor], alone: list[Tensor], start: int, end: int) -> Tensor:
    """int64 ``[rows, T]``: the first row of all that each of these rows is one with at each token."""
    equal = seen[start:end, None] == seen
    for each in same:
        equal &= (each[start:end, None] == each).unsqueeze(3).flatten(3).all(3) | ~seen
    equal = equal.cumprod(2, dtype=torch.uint8)
    for each in alone:
        equal &= ~(each[start:end, None] | each)
    rows = torch.arange(len(seen), device=seen.device)
    return torch.where(equal.any(1).bool(), equal.argmax(1), rows[start:end, None])


@shared_tokens.register_fake
def _(seen: Tensor, same: list[Tensor], alone: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(seen), seen.new_empty(seen.shape[0] * seen.shape[1], dtype=torch.int64)]


@composite("(Tensor self, Tensor index) -> Tensor")
def spread_rows(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``, ``[len(index), ...]``. The gradients of a row that is taken several times are added in fp32."""
    return _Spread.apply(rows, index)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros((ctx.rows, *grad.shape[1:]), dtype=dtype)
        return total.index_add(0, index, grad.to(dtype)).to(grad.dtype), None
