"""Grouped products over stacked expert weights: ``grouped_linear`` and, for its weight gradient, ``grouped_outer``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glue_compiler.ops import grouped_mm, quack_products
from glue_compiler.ops.autocast import run_in_autocast_dtype
from glue_compiler.ops.grouped_rows import check_rows, grouped_sum
from glue_compiler.ops.kernel_support import runs_triton
from glue_compiler.ops.opaque import opaque


@opaque("grouped_linear")
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
    packages: bool = True,
) -> Tensor:
    """``F.linear`` with another weight for each group of rows.

    Args:
        x: floating ``[rows, K]``, rows in expert order, any strides.
        weight: ``[E, N, K]`` (``F.linear``'s layout: ``x @ weight[e].T``), or with ``transposed`` ``[E, K, N]``
            (``x @ weight[e]``). Any strides; a copy is made only when neither of the last two dimensions is contiguous.
        offsets: int32 ``[E]``, inclusive cumulative row counts from ``expert_sort``; the last is at most ``rows``.
        bias: ``[E, N]`` or None.
        transposed: the layout of ``weight``.
        packages: may kernels of other packages that are installed serve it, and its gradients?

    Returns:
        ``[rows, N]`` in the dtype of ``x``; sums in fp32 (fp64 for fp64). Rows from ``offsets[-1]`` on are zero.
        float32 uses tf32 exactly when ``torch.backends.cuda.matmul.allow_tf32`` does. No host synchronisation on CUDA
        with Triton; without it, and on the CPU, the offsets are read on the host.

    Gradients: of ``x`` by the same product with the other layout, of ``weight`` by ``grouped_outer`` (zeros for an
    expert without rows), of ``bias`` by ``grouped_sum``. ``x`` is kept only if ``weight`` needs a gradient, ``weight``
    only if ``x`` does, and work is done only for what needs a gradient. All of it is deterministic.

    Raises:
        ValueError: dimensions, sizes or dtypes that do not fit together.
    """
    _check_linear(x, weight, offsets, bias, transposed)
    if packages and quack_products.serves_linear(x, weight, offsets, bias, transposed):
        out = quack_products.linear(x, weight, offsets, bias, transposed)
        if out is not None:
            return out
    if runs_triton(x, multiplies=True):
        from glue_compiler.ops import grouped_product_triton

        return grouped_product_triton.linear(x, weight, offsets, bias, transposed)
    return reference_linear(x, weight, offsets, bias, transposed)


@grouped_linear.register_fake
def _(x, weight, offsets, bias=None, transposed=False, packages=True):  # type: ignore[no-untyped-def]
    _check_linear(x, weight, offsets, bias, transposed)
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@opaque("grouped_outer")
def grouped_outer(left: Tensor, right: Tensor, offsets: Tensor, packages: bool = True) -> Tensor:
    """``out[e] = left[rows of e].T @ right[rows of e]``: the gradient of stacked weights.

    Args:
        left: floating ``[rows, M]``. right: ``[rows, N]`` of the same dtype. Any strides.
        offsets: int32 ``[E]``, inclusive cumulative row counts.
        packages: may kernels of other packages that are installed serve it, and its gradients?

    Returns:
        ``[E, M, N]`` in the dtype of ``left``, summed in fp32 (fp64 for fp64); zeros for a group without rows. Rows
        from ``offsets[-1]`` on are not read. It has no gradients of its own.

    Raises:
        ValueError: dimensions, sizes or dtypes that do not fit together.
    """
    _check_outer(left, right, offsets)
    if packages and quack_products.serves_outer(left, right, offsets):
        product = quack_products.outer(left, right, offsets)
        if product is not None:
            return product
    if grouped_mm.serves(left, right):
        return grouped_mm.outer(left, right, offsets)
    if runs_triton(left, multiplies=True):
        from glue_compiler.ops import grouped_product_triton

        return grouped_product_triton.outer(left, right, offsets)
    out = left.new_zeros(offsets.shape[0], left.shape[1], right.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=out[expert])
        start = end
    return out


@grouped_outer.register_fake
def _(left, right, offsets, packages=True):  # type: ignore[no-untyped-def]
    _check_outer(left, right, offsets)
    return left.new_empty(offsets.shape[0], left.shape[1], right.shape[1])


def reference_linear(x: Tensor, weights: Any, offsets: Tensor, biases: Any, transposed: bool) -> Tensor:
    """``grouped_linear`` as a loop over the groups; ``weights`` and ``biases`` are indexed by expert. Syncs on CUDA."""
    out = x.new_zeros(x.shape[0], weights[0].shape[1 if transposed else 0])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            weight = weights[expert] if transposed else weights[expert].t()
            if biases is None:
                torch.mm(x[start:end], weight, out=out[start:end])
            else:
                torch.addmm(biases[expert], x[start:end], weight, out=out[start:end])
        start = end
    return out


def _check_linear(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> None:
    check_rows("grouped_linear", x, offsets)
    if weight.dim() != 3:
        raise ValueError(f"grouped_linear: weight must have 3 dimensions, got {weight.dim()}")
    experts, width_in, width_out = (weight.shape[index] for index in ((0, 1, 2) if transposed else (0, 2, 1)))
    if width_in != x.shape[1]:
        layout = "[E, K, N]" if transposed else "[E, N, K]"
        raise ValueError(f"grouped_linear: x has K = {x.shape[1]}, the weight {tuple(weight.shape)} is {layout}")
    if offsets.shape[0] != experts:
        raise ValueError(f"grouped_linear: {offsets.shape[0]} offsets for {experts} experts")
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"grouped_linear: x, weight and bias must have one dtype, got {x.dtype}, {weight.dtype}"
            f"{'' if bias is None else f' and {bias.dtype}'}"
        )
    if bias is not None and tuple(bias.shape) != (experts, width_out):
        raise ValueError(f"grouped_linear: bias must be [{experts}, {width_out}], got {tuple(bias.shape)}")


def _check_outer(left: Tensor, right: Tensor, offsets: Tensor) -> None:
    check_rows("grouped_outer", left, offsets)
    check_rows("grouped_outer", right, offsets)
    if left.dtype != right.dtype:
        raise ValueError(f"grouped_outer: left and right must have one dtype, got {left.dtype} and {right.dtype}")
    torch._check_value(left.shape[0] == right.shape[0], lambda: "grouped_outer: left and right must have the same rows")


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offsets, _, ctx.transposed, ctx.packages = inputs
    # In the weight's own layout: what is kept as a parameter's gradient is copied if it has another.
    strides = weight.stride()[1:]
    ctx.is_turned = all(isinstance(stride, int) for stride in strides) and strides[0] == 1 != strides[1]
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, offsets)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    # The dispatcher drops arguments that equal their defaults, so the flags may end before the bias.
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    needs_bias = any(ctx.needs_input_grad[3:4])
    grad_x = grad_weight = grad_bias = None
    if needs_x:
        grad_x = grouped_linear(grad, weight, offsets, None, not ctx.transposed, ctx.packages)
    if needs_weight:
        left, right = (x, grad) if ctx.transposed != ctx.is_turned else (grad, x)
        grad_weight = grouped_outer(left, right, offsets, ctx.packages)
        grad_weight = grad_weight.transpose(1, 2) if ctx.is_turned else grad_weight
    if needs_bias:
        grad_bias = grouped_sum(grad, offsets)
    return grad_x, grad_weight, None, grad_bias, None, None


grouped_linear.register_autograd(_linear_backward, setup_context=_linear_setup)
run_in_autocast_dtype(grouped_linear)
