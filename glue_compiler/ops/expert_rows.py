"""Rows in expert order: gather them from tokens, and combine them back into tokens.

The two operators are each other's derivative, so both directions of both are the same two loops; ``expert_dot`` is the
gradient of the weights, and has none of its own. None of them uses atomics: through ``inverse`` every token finds its
own rows and adds them in the order of its slots. See ``expert_sort`` for slots, rows, ``order``, ``inverse`` and
``offsets``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glue_compiler.ops.kernel_support import accumulator_dtype, runs_triton, with_dense_rows
from glue_compiler.ops.opaque import opaque


def _check(
    name: str, rows: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int, weights: Tensor | None
) -> None:
    if rows.dim() != 2:
        raise ValueError(f"{name}: expected a [rows, width] tensor, got {rows.dim()} dimensions")
    if top_k < 1:
        raise ValueError(f"{name}: top_k must be at least 1, got {top_k}")
    for label, tensor in (("order", order), ("inverse", inverse), ("offsets", offsets)):
        if tensor.dim() != 1 or tensor.dtype != torch.int32:
            raise ValueError(f"{name}: {label} must be an int32 vector, got {tensor.dtype}, {tensor.dim()} dimensions")
    if weights is not None and not weights.is_floating_point():
        raise ValueError(f"{name}: weights must be floating point, got {weights.dtype}")


@opaque("expert_gather")
def expert_gather(
    tokens: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int, weights: Tensor | None = None
) -> Tensor:
    """Rows in expert order: ``rows[i] = tokens[order[i] // top_k]``, times the slot's weight if there are weights.

    Args:
        tokens: floating ``[tokens, width]``, any strides.
        order, inverse, offsets: int32, from ``expert_sort``.
        top_k: slots per token, a Python int.
        weights: floating ``[tokens, top_k]`` (any shape with one element per slot), or None. The product is taken in
            fp32 (fp64 for fp64 tokens) and rounded once.

    Returns:
        ``[slots, width]`` in the dtype of ``tokens``. Rows that belong to no expert are zero.

    Gradients: of ``tokens`` by ``expert_combine`` (a sum over slots in slot order: deterministic), of ``weights`` by
    ``expert_dot``. Nothing of size ``[slots, width]`` is kept for backward.

    Raises:
        ValueError: wrong dimensions or dtypes, ``top_k < 1``.
    """
    _check("expert_gather", tokens, order, inverse, offsets, top_k, weights)
    if runs_triton(tokens):
        from glue_compiler.ops import expert_rows_triton

        return expert_rows_triton.gather(with_dense_rows(tokens), inverse, offsets, top_k, _flat(weights))
    rows = tokens[order.long() // top_k]
    if weights is not None:
        work = accumulator_dtype(tokens.dtype)
        rows = (rows.to(work) * weights.reshape(-1)[order.long()].to(work).unsqueeze(1)).to(tokens.dtype)
    return torch.where(_owned(order, offsets).unsqueeze(1), rows, 0)


@expert_gather.register_fake
def _(tokens, order, inverse, offsets, top_k, weights=None):  # type: ignore[no-untyped-def]
    _check("expert_gather", tokens, order, inverse, offsets, top_k, weights)
    return tokens.new_empty(order.shape[0], tokens.shape[1])


@opaque("expert_combine")
def expert_combine(
    rows: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    top_k: int,
    weights: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows back to tokens: ``out[t] = sum over j of weights[t, j] * rows[inverse[t * top_k + j]]``.

    Args:
        rows: floating ``[slots, width]`` in expert order, any strides.
        order, inverse, offsets: int32, from ``expert_sort``.
        top_k: slots per token, a Python int.
        weights: floating ``[tokens, top_k]`` (any shape with one element per slot), or None for ones.
        out_dtype: dtype of the result, by default that of ``rows``.

    Returns:
        ``[slots // top_k, width]``. Slots that belong to no expert add nothing, whatever their rows hold (NaN too).
        The sum is taken in fp32 (fp64 for fp64 rows) in the order of the slots and rounded once.

    Gradients: of ``rows`` by ``expert_gather``, of ``weights`` by ``expert_dot``. ``rows`` are kept for backward only
    when the weights need a gradient.

    Raises:
        ValueError: wrong dimensions or dtypes, ``top_k < 1``.
    """
    _check("expert_combine", rows, order, inverse, offsets, top_k, weights)
    out_dtype = out_dtype or rows.dtype
    if runs_triton(rows):
        from glue_compiler.ops import expert_rows_triton

        return expert_rows_triton.combine(with_dense_rows(rows), inverse, offsets, top_k, _flat(weights), out_dtype)
    work = accumulator_dtype(rows.dtype)
    by_slot = torch.where(_owned(order, offsets).unsqueeze(1), rows, 0).to(work)[inverse.long()]
    if weights is not None:
        by_slot = by_slot * weights.reshape(-1, 1).to(work)
        # A weight may be infinite where its slot belongs to no expert.
        by_slot = torch.where((inverse < offsets[-1]).unsqueeze(1), by_slot, 0)
    return by_slot.view(-1, top_k, rows.shape[1]).sum(1).to(out_dtype)


@expert_combine.register_fake
def _(rows, order, inverse, offsets, top_k, weights=None, out_dtype=None):  # type: ignore[no-untyped-def]
    _check("expert_combine", rows, order, inverse, offsets, top_k, weights)
    return rows.new_empty(rows.shape[0] // top_k, rows.shape[1], dtype=out_dtype or rows.dtype)


@opaque("expert_dot")
def expert_dot(
    rows: Tensor, tokens: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int, out_dtype: torch.dtype
) -> Tensor:
    """``out[t, j] = dot(rows[inverse[t * top_k + j]], tokens[t])``: the gradient of routing weights.

    Args:
        rows: floating ``[slots, width]`` in expert order. tokens: floating ``[tokens, width]``.
        order, inverse, offsets, top_k: as for ``expert_combine``. out_dtype: dtype of the result.

    Returns:
        ``[tokens, top_k]``, summed in fp32 (fp64 for fp64 rows); zero for slots that belong to no expert.

    Raises:
        ValueError: wrong dimensions or dtypes, ``top_k < 1``.
    """
    _check("expert_dot", rows, order, inverse, offsets, top_k, None)
    if runs_triton(rows):
        from glue_compiler.ops import expert_rows_triton

        return expert_rows_triton.dot(
            with_dense_rows(rows), with_dense_rows(tokens), inverse, offsets, top_k, out_dtype
        )
    work = accumulator_dtype(rows.dtype)
    by_slot = rows.to(work)[inverse.long()].view(-1, top_k, rows.shape[1])
    products = (by_slot * tokens.to(work).unsqueeze(1)).sum(-1)
    return torch.where((inverse < offsets[-1]).view(-1, top_k), products, 0).to(out_dtype)


@expert_dot.register_fake
def _(rows, tokens, order, inverse, offsets, top_k, out_dtype):  # type: ignore[no-untyped-def]
    _check("expert_dot", rows, order, inverse, offsets, top_k, None)
    return rows.new_empty(rows.shape[0] // top_k, top_k, dtype=out_dtype)


def _flat(weights: Tensor | None) -> Tensor | None:
    """One weight per slot, dense: a reshaped expanded gradient may still have stride 0."""
    return None if weights is None else weights.reshape(-1).contiguous()


def _owned(order: Tensor, offsets: Tensor) -> Tensor:
    """bool ``[slots]``: which rows belong to an expert."""
    return torch.arange(order.shape[0], device=order.device) < offsets[-1]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Of ``expert_gather`` and ``expert_combine``: what the one needs for its gradients, the other does."""
    moved, order, inverse, offsets, ctx.top_k, weights, *_ = inputs
    ctx.dtype = moved.dtype
    needs_moved, needs_weights = ctx.needs_input_grad[0], weights is not None and ctx.needs_input_grad[5]
    kept_weights = weights if needs_moved or needs_weights else None
    ctx.save_for_backward(moved if needs_weights else None, order, inverse, offsets, kept_weights)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tokens, *places, weights = ctx.saved_tensors
    grad_tokens = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_tokens = expert_combine(grad, *places, ctx.top_k, weights, ctx.dtype)
    if weights is not None and ctx.needs_input_grad[5]:
        grad_weights = expert_dot(grad, tokens, *places, ctx.top_k, weights.dtype).reshape(weights.shape)
    return grad_tokens, None, None, None, None, grad_weights


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, *places, weights = ctx.saved_tensors
    grad_rows = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_rows = expert_gather(grad, *places, ctx.top_k, weights).to(ctx.dtype)
    if weights is not None and ctx.needs_input_grad[5]:
        grad_weights = expert_dot(rows, grad, *places, ctx.top_k, weights.dtype).reshape(weights.shape)
    return grad_rows, None, None, None, None, grad_weights, None


expert_gather.register_autograd(_gather_backward, setup_context=_setup)
expert_combine.register_autograd(_combine_backward, setup_context=_setup)
