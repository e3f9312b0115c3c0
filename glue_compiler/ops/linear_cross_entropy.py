"""``linear_cross_entropy``: a projection to the vocabulary and its cross entropy, in chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glue_compiler.ops.counted_rows import counted_rows
from glue_compiler.ops.kernel_support import accumulator_dtype
from glue_compiler.ops.linear_logits import LinearLogits, OperandGradients, logits_dtype
from glue_compiler.ops.opaque import opaque
from glue_compiler.ops.row_losses import CrossEntropy, Scores


@opaque("linear_cross_entropy")
def linear_cross_entropy(
    rows: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    scale: float,
    softcap: float,
    dtype: torch.dtype,
    needs_grad: Sequence[bool],
    wants_predictions: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """``F.cross_entropy`` of logits ``sum_k rows[k] @ weights[k].T + bias``, which exist a chunk of rows at a time.

    Args:
        rows: floating ``[N, K_k]``. weights: ``[V, K_k]``, each of its rows' dtype. Any strides.
        bias: floating ``[V]`` or None. The logits have the dtype to which products and bias are promoted.
        target: int64 ``[N]``. class_weight: floating ``[V]`` or None; it has no gradient.
        reduction: "mean" or "sum". ignore_index, label_smoothing: as in ``F.cross_entropy``.
        scale, softcap: the softmax is taken of ``scale * logits``, or ``softcap * tanh(scale * logits)`` where
            ``softcap`` is not 0.
        dtype: of the loss, which is computed in float32 at least.
        needs_grad: for rows, weights and bias, in that order, whether forward makes their gradient.
        wants_predictions: whether ``predictions`` are wanted.

    Returns:
        ``loss`` of no dimension; ``predictions``, the argmax of each row, int64 ``[N]`` or ``[0]``; ``gradients`` of
        the operands that need one, in order, for an upstream gradient of one, each of its operand's shape and dtype.
        The list is empty with float16 operands or logits, whose small gradients need the loss's scale.

    Gradients of rows, weights and bias: backward multiplies those from forward. What forward was not told to make, and
    all of it with float16, is computed in backward from the logits anew. Differentiable once.

    On a CPU an ignored row costs no product, unless predictions are wanted: of its logits alone. No host
    synchronisation on CUDA. Two runs give equal bits.

    Raises:
        ValueError: dimensions, sizes or dtypes that do not fit together, another reduction, a class weight that
            requires a gradient.
        IndexError: on a CPU, a target outside of ``[0, V)`` that is not ``ignore_index``; on CUDA the device asserts.
    """
    _check(rows, weights, bias, target, class_weight, reduction, needs_grad)
    settings = (reduction, ignore_index, label_smoothing, scale, softcap, dtype)
    made = _made_in_forward(rows, bias, needs_grad)
    return _solved(rows, weights, bias, target, class_weight, *settings, made, wants_predictions, None)


@linear_cross_entropy.register_fake
def _(  # type: ignore[no-untyped-def]
    rows, weights, bias, target, class_weight, reduction, ignore_index, label_smoothing, scale, softcap, dtype,
    needs_grad, wants_predictions,
):  # fmt: skip
    _check(rows, weights, bias, target, class_weight, reduction, needs_grad)
    loss = rows[0].new_empty((), dtype=dtype)
    predictions = target.new_empty(rows[0].shape[0] if wants_predictions else 0)
    return loss, predictions, empty_gradients(rows, weights, bias, _made_in_forward(rows, bias, needs_grad))


@opaque("linear_cross_entropy_gradients")
def linear_cross_entropy_gradients(
    upstream: Tensor,
    rows: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    scale: float,
    softcap: float,
    dtype: torch.dtype,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """Gradients of ``linear_cross_entropy`` for an ``upstream`` gradient of its loss; see there."""
    settings = (reduction, ignore_index, label_smoothing, scale, softcap, dtype)
    return _solved(rows, weights, bias, target, class_weight, *settings, needs_grad, False, upstream)[2]


@linear_cross_entropy_gradients.register_fake
def _(upstream, rows, weights, bias, *others):  # type: ignore[no-untyped-def]
    return empty_gradients(rows, weights, bias, others[-1])


def _solved(
    rows: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    scale: float,
    softcap: float,
    dtype: torch.dtype,
    needs_grad: Sequence[bool],
    wants_predictions: bool,
    upstream: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What ``linear_cross_entropy`` gives, with the gradients that ``needs_grad`` names.

    ``upstream``: the gradient of the loss; None: one.
    """
    with torch.autocast(target.device.type, enabled=False):
        ignored = target == ignore_index
        check_targets(target, ignored, weights[0].shape[0])
        others = [bias, class_weight if label_smoothing else None]
        counted = counted_rows(rows, weights, others, ignored, scale, wants_predictions)
        logits = LinearLogits(rows, weights, bias, needs_grad, counted)
        work = accumulator_dtype(logits.dtype, dtype)
        target, ignored = counted.take(target.masked_fill(ignored, -1)), counted.take(ignored)
        row_weight = (~ignored).to(work)
        if class_weight is not None:
            class_weight = class_weight.to(work)
            row_weight = class_weight[target.clamp(min=0)].masked_fill(ignored, 0)
        divisor = row_weight.sum() if reduction == "mean" else row_weight.new_ones(())
        factor = divisor.reciprocal() if upstream is None else upstream.to(work) / divisor
        spread = None
        if label_smoothing:
            spread = (~ignored).to(work) * (label_smoothing / logits.width)
        losses_of = CrossEntropy(
            Scores(scale, softcap),
            target,
            row_weight * (1 - label_smoothing),
            spread,
            class_weight if label_smoothing else None,
            factor,
        )
        losses = row_weight.new_empty(logits.height)
        predictions = target.new_empty(logits.height) if wants_predictions else None
        gradients = OperandGradients(logits, needs_grad)
        for chunk in logits.chunks:
            # No name holds the logits, which are to be freed before the gradients are rounded.
            gradients.add(chunk, losses_of.run(logits.of(chunk), chunk, losses, predictions, any(needs_grad)))
        for chunk in logits.others:
            losses_of.run(logits.of(chunk), chunk, losses, predictions, False)
        loss = losses.sum() / divisor
        if spread is not None and class_weight is not None:
            # Eager divides both parts of a smoothed loss: of targets whose weights are all zero one is 0 / 0.
            loss = loss * (divisor / divisor)
        loss = loss.to(dtype)
        found = target.new_empty(0) if predictions is None else counted.put(predictions)
        return loss, found, gradients.results()


def check_targets(target: Tensor, ignored: Tensor, width: int) -> None:
    """Raises IndexError for a target that names no class; on CUDA the device asserts, without a synchronisation."""
    if target.is_cuda:
        fits = ((target >= 0) & (target < width) | ignored).all()
        torch.ops.aten._assert_async.msg(fits, "cross entropy: a target is out of bounds")
    else:
        # torch's own check, as eager has it, of losses that occupy no memory.
        nothing = torch.zeros(1, device=target.device).expand(target.shape[0], width)
        torch.nn.functional.nll_loss(nothing, target.masked_fill(ignored, 0), ignore_index=0, reduction="none")


def _made_in_forward(rows: list[Tensor], bias: Tensor | None, needs_grad: Sequence[bool]) -> Sequence[bool]:
    """Of the gradients that are needed, those that forward makes."""
    is_half = torch.float16 in (logits_dtype(rows, bias), *(tensor.dtype for tensor in rows))
    return [False] * len(needs_grad) if is_half else needs_grad


def empty_gradients(
    rows: list[Tensor], weights: list[Tensor], bias: Tensor | None, needs_grad: Sequence[bool]
) -> list[Tensor]:
    """As fakes have them: gradients of the operands that need one, in the order of rows, weights, bias."""
    operands = [*rows, *weights, *(() if bias is None else (bias,))]
    return [each.new_empty(each.shape) for each, needed in zip(operands, needs_grad, strict=False) if needed]


def _check(
    rows: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    needs_grad: Sequence[bool],
) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"linear_cross_entropy: reduction must be 'mean' or 'sum', got {reduction!r}")
    check_operands("linear_cross_entropy", rows, weights, bias, target)
    if class_weight is not None and tuple(class_weight.shape) != tuple(weights[0].shape[:1]):
        raise ValueError(f"linear_cross_entropy: class_weight must be [V], got {list(class_weight.shape)}")
    if len(needs_grad) != 2 * len(rows) + 1 or (bias is None and needs_grad[-1]):
        raise ValueError(f"linear_cross_entropy: needs_grad must name {len(rows)} rows, their weights and the bias")


def check_operands(
    name: str, rows: list[Tensor], weights: list[Tensor], bias: Tensor | None, target: Tensor | None
) -> None:
    """What both operators over linear logits ask of their operands. Raises ValueError."""
    if not rows or len(rows) != len(weights):
        raise ValueError(f"{name}: {len(rows)} rows for {len(weights)} weights")
    for k, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        if row.dim() != 2 or weight.dim() != 2 or not row.is_floating_point() or weight.dtype != row.dtype:
            raise ValueError(
                f"{name}: rows {k} and weight {k} must be floating matrices of one dtype, got {row.dtype} "
                f"{list(row.shape)} and {weight.dtype} {list(weight.shape)}"
            )
        torch._check_value(row.shape[1] == weight.shape[1], lambda: f"{name}: rows and weight differ in width")
        torch._check_value(row.shape[0] == rows[0].shape[0], lambda: f"{name}: rows differ in number")
        torch._check_value(weight.shape[0] == weights[0].shape[0], lambda: f"{name}: weights differ in classes")
    if bias is not None:
        torch._check_value(bias.dim() == 1 and bias.shape[0] == weights[0].shape[0], lambda: f"{name}: bias is not [V]")
    if target is not None:
        if target.dim() != 1 or target.dtype != torch.int64:
            raise ValueError(f"{name}: target must be an int64 vector, got {target.dtype} {list(target.shape)}")
        torch._check_value(target.shape[0] == rows[0].shape[0], lambda: f"{name}: rows and targets differ in number")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    rows, weights, bias, target, class_weight, *ctx.settings, made, _ = inputs
    _, predictions, gradients = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(predictions, *gradients)
    # Here the flags are still flat, one for each tensor of a list.
    needed = list(ctx.needs_input_grad[: 2 * len(rows) + 1])
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError("linear_cross_entropy: class_weight has no gradient, but requires one")
    ctx.count, ctx.made, ctx.needed = len(rows), list(made) if gradients else [False] * len(made), needed
    ctx.recomputes = any(need and not is_made for need, is_made in zip(needed, ctx.made, strict=True))
    ctx.save_for_backward(*rows, *weights, bias, target, class_weight, *gradients)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    count = ctx.count
    results: list[Tensor | None] = [None] * (2 * count + 1)
    if upstream is not None:
        saved = ctx.saved_tensors  # once: a checkpoint gives it once
        operands, rest = saved[: 2 * count], saved[2 * count :]
        # Who takes gradients of these gradients gets an operator that has none, and so an error.
        if ctx.recomputes or torch.is_grad_enabled():
            found = linear_cross_entropy_gradients(
                upstream, operands[:count], operands[count:], *rest[:3], *ctx.settings, ctx.needed
            )
            made = ctx.needed
        else:
            # A mean over no targets at all, taken outside, has an infinite gradient: of ignored rows it stays 0.
            # Factors with a dimension take part in promotion: they are not rounded to the gradient's dtype.
            ignored = (rest[1] == ctx.settings[1])[:, None]
            of_rows = torch.where(ignored, 1, upstream)
            of_sums = torch.where(ignored.all(0), 1, upstream)
            factors = [*[of_rows] * sum(ctx.made[:count]), *[of_sums] * sum(ctx.made[count:])]
            found = [(g * factor).to(g.dtype) for g, factor in zip(rest[3:], factors, strict=True)]
            made = ctx.made
        for place, gradient in zip((place for place, is_made in enumerate(made) if is_made), found, strict=True):
            results[place] = gradient if ctx.needed[place] else None
    return results[:count], results[count : 2 * count], results[-1], *[None] * 10


linear_cross_entropy.register_autograd(_backward, setup_context=_setup)
