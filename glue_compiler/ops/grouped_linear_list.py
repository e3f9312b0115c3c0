"""``grouped_linear`` over separate weight tensors (a ModuleList of experts), which are never stacked in memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from glue_compiler.ops.autocast import run_in_autocast_dtype
from glue_compiler.ops.grouped_linear import grouped_outer, reference_linear
from glue_compiler.ops.grouped_rows import check_rows, grouped_sum
from glue_compiler.ops.kernel_support import runs_triton
from glue_compiler.ops.opaque import opaque


@opaque("grouped_linear_list")
def grouped_linear_list(
    x: Tensor, weights: list[Tensor], offsets: Tensor, biases: list[Tensor], transposed: bool = False
) -> Tensor:
    """``grouped_linear`` with one weight tensor per expert.

    On CUDA the kernel finds the weights through a table of their addresses; the table is made on the host, copied from
    pinned memory without a sync, and kept for as long as the same addresses come back.

    Args:
        x: floating ``[rows, K]``, rows in expert order, any strides.
        weights: E tensors ``[N, K]`` (or ``[K, N]`` with ``transposed``) of one shape, dtype and device.
        offsets: int32 ``[E]``, inclusive cumulative row counts.
        biases: E tensors ``[N]``, or an empty list.
        transposed: the layout of the weights.

    Returns:
        ``[rows, N]`` in the dtype of ``x``; rows from ``offsets[-1]`` on are zero. See ``grouped_linear``.

    Gradients: one for each weight and bias tensor, as views of one stacked buffer; zeros for an expert without rows
    (where an eager loop leaves ``grad`` at None). Frozen tensors get None and, when all are frozen, no work is done.

    Raises:
        ValueError: no weights, or shapes, sizes or dtypes that do not fit together.
    """
    _check(x, weights, offsets, biases, transposed)
    if runs_triton(x, multiplies=True):
        from glue_compiler.ops import grouped_product_triton

        return grouped_product_triton.linear_list(x, weights, offsets, biases, transposed)
    return reference_linear(x, weights, offsets, biases or None, transposed)


@grouped_linear_list.register_fake
def _(x, weights, offsets, biases, transposed=False):  # type: ignore[no-untyped-def]
    _check(x, weights, offsets, biases, transposed)
    return x.new_empty(x.shape[0], weights[0].shape[1 if transposed else 0])


def _check(x: Tensor, weights: list[Tensor], offsets: Tensor, biases: list[Tensor], transposed: bool) -> None:
    check_rows("grouped_linear_list", x, offsets)
    if not weights or offsets.shape[0] != len(weights):
        raise ValueError(f"grouped_linear_list: {offsets.shape[0]} offsets for {len(weights)} weights")
    width_out, width_in = reversed(weights[0].shape) if transposed else weights[0].shape
    for kind, tensors, shape in (("weight", weights, tuple(weights[0].shape)), ("bias", biases, (width_out,))):
        for expert, tensor in enumerate(tensors):
            if tuple(tensor.shape) != shape or tensor.dtype != x.dtype:
                raise ValueError(
                    f"grouped_linear_list: {kind} {expert} must be {x.dtype} {list(shape)}, got {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
    if width_in != x.shape[1]:
        raise ValueError(f"grouped_linear_list: x has K = {x.shape[1]}, the weights have {width_in}")
    if biases and len(biases) != len(weights):
        raise ValueError(f"grouped_linear_list: {len(biases)} biases for {len(weights)} weights")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, offsets, _, ctx.transposed = inputs
    # Here the flags are still flat, one for each tensor of a list; in backward torch gives them the inputs' structure.
    needs_x, needs_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1 : 1 + len(weights)])
    ctx.save_for_backward(x if needs_weights else None, offsets, *(weights if needs_x else ()))


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, offsets, *weights = ctx.saved_tensors
    needs_x, needs_weights, _, needs_biases = ctx.needs_input_grad[:4]
    grad_x = grouped_linear_list(grad, weights, offsets, [], not ctx.transposed) if needs_x else None
    grad_weights: list[Tensor | None] = [None] * len(needs_weights)
    grad_biases: list[Tensor | None] = [None] * len(needs_biases)
    if any(needs_weights):
        left, right = (x, grad) if ctx.transposed else (grad, x)
        stacked = grouped_outer(left, right, offsets).unbind(0)
        grad_weights = [each if needed else None for each, needed in zip(stacked, needs_weights, strict=True)]
    if any(needs_biases):
        stacked = grouped_sum(grad, offsets).unbind(0)
        grad_biases = [each if needed else None for each, needed in zip(stacked, needs_biases, strict=True)]
    # The dispatcher drops `transposed` where it is the default, and torch wants as many gradients as arguments.
    return (grad_x, grad_weights, None, grad_biases, None)[: len(ctx.needs_input_grad)]


grouped_linear_list.register_autograd(_backward, setup_context=_setup)
run_in_autocast_dtype(grouped_linear_list)
