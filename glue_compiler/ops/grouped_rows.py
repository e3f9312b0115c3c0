"""Per-expert vectors and rows in expert order: repeat a vector for each row of its expert, sum rows per expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glue_compiler.ops.kernel_support import accumulator_dtype, runs_triton, with_dense_rows
from glue_compiler.ops.opaque import opaque


@opaque("grouped_sum")
def grouped_sum(rows: Tensor, offsets: Tensor) -> Tensor:
    """``out[e] = rows[rows of e].sum(0)``: the gradient of per-expert biases.

    Args:
        rows: floating ``[rows, width]``, any strides. offsets: int32 ``[E]``, inclusive cumulative row counts.

    Returns:
        ``[E, width]`` in the dtype of ``rows``, summed in fp32 (fp64 for fp64) in an order that depends on nothing but
        the counts; zeros for an expert without rows. Rows from ``offsets[-1]`` on are not read.

    Raises:
        ValueError: ``rows`` not floating ``[rows, width]``, or ``offsets`` not an int32 vector.
    """
    check_rows("grouped_sum", rows, offsets)
    if runs_triton(rows):
        from glue_compiler.ops import grouped_rows_triton

        return grouped_rows_triton.sum_rows(with_dense_rows(rows), offsets)
    work = accumulator_dtype(rows.dtype)
    out = rows.new_zeros(offsets.shape[0], rows.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        out[expert] = rows[start:end].sum(0, dtype=work)
        start = end
    return out


@grouped_sum.register_fake
def _(rows, offsets):  # type: ignore[no-untyped-def]
    check_rows("grouped_sum", rows, offsets)
    return rows.new_empty(offsets.shape[0], rows.shape[1])


@opaque("grouped_repeat")
def grouped_repeat(values: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """``out[i] = values[expert of row i]``, for ``values[e]`` in a lifted loop body.

    Args:
        values: floating ``[E, width]``, any strides. offsets: int32 ``[E]``, inclusive cumulative row counts.
        rows: number of rows of the result (a Python int, or a symbol under compile), at least ``offsets[-1]``.

    Returns:
        ``[rows, width]`` in the dtype of ``values``; rows from ``offsets[-1]`` on are zero.

    Gradient: ``grouped_sum``, which is deterministic where indexing's backward is not.

    Raises:
        ValueError: ``values`` not floating ``[E, width]``, or ``offsets`` not an int32 ``[E]``.
    """
    _check_values(values, offsets)
    if runs_triton(values):
        from glue_compiler.ops import grouped_rows_triton

        return grouped_rows_triton.repeat(with_dense_rows(values), offsets, rows)
    row = torch.arange(rows, device=values.device)
    expert = torch.searchsorted(offsets, row.int(), right=True)
    owned = expert < values.shape[0]
    return torch.where(owned.unsqueeze(1), values[expert.clamp(max=values.shape[0] - 1)], 0)


@grouped_repeat.register_fake
def _(values, offsets, rows):  # type: ignore[no-untyped-def]
    _check_values(values, offsets)
    return values.new_empty(rows, values.shape[1])


def check_rows(name: str, rows: Tensor, offsets: Tensor) -> None:
    """What every operator over rows in expert order asks of its rows and offsets. Raises ValueError."""
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"{name}: expected floating [rows, width], got {rows.dtype} with {rows.dim()} dimensions")
    if offsets.dim() != 1 or offsets.dtype != torch.int32:
        raise ValueError(f"{name}: offsets must be an int32 vector, got {offsets.dtype}, {offsets.dim()} dimensions")


def _check_values(values: Tensor, offsets: Tensor) -> None:
    check_rows("grouped_repeat", values, offsets)
    if offsets.shape[0] != values.shape[0]:
        raise ValueError(f"grouped_repeat: {offsets.shape[0]} offsets for {values.shape[0]} experts")


def _repeat_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _repeat_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
    return grouped_sum(grad, ctx.saved_tensors[0]), None, None


grouped_repeat.register_autograd(_repeat_backward, setup_context=_repeat_setup)
