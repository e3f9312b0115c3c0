"""``linear_row_statistics``: what losses take from rows of logits, which exist a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glue_compiler.ops.counted_rows import CountedRows, counted_rows
from glue_compiler.ops.kernel_support import accumulator_dtype
from glue_compiler.ops.linear_cross_entropy import check_operands, check_targets, empty_gradients
from glue_compiler.ops.linear_logits import LinearLogits, OperandGradients, logits_dtype
from glue_compiler.ops.opaque import opaque
from glue_compiler.ops.row_losses import RowStatistics, Scores

NAMES = ("logsumexp", "target_logit", "sum", "entropy", "argmax")


@opaque("linear_row_statistics")
def linear_row_statistics(
    rows: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    target: Tensor | None,
    scale: float,
    softcap: float,
    dtype: torch.dtype,
    wants: Sequence[bool],
    skips_ignored: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a loss may be put together from, by row of ``z = scale * (sum_k rows[k] @ weights[k].T + bias)``.

    Args:
        rows, weights, bias, scale, softcap: as for ``linear_cross_entropy``.
        target: int64 ``[N]``, wanted for the target's logit. A negative one is ignored.
        dtype: float64 asks for statistics in float64; see below.
        wants: which of the five results are wanted, in their order.
        skips_ignored: whether nobody reads results of a row with a negative target. On a CPU they are not computed,
            and 0, unless its logits may not be finite.

    Returns:
        ``logsumexp``, ``target_logit`` (``z[target]``, 0 for a negative target), ``sum`` over the classes, ``entropy``
        of the softmax, and ``argmax`` (int64, without a gradient); each ``[N]``, or ``[0]`` if it is not wanted. In
        float64 where ``dtype`` or the logits have it, else in float32 also for 16-bit ones: a loss is the small
        difference of a logsumexp and a logit, and is cast after it was taken.

    Gradients of rows, weights and bias, for which backward makes the logits of each chunk again. Differentiable once.

    No host synchronisation on CUDA. Two runs give equal bits.

    Raises:
        ValueError: dimensions, sizes or dtypes that do not fit together, a target's logit without a target.
        IndexError: on a CPU, a target of at least ``V``; on CUDA the device asserts.
    """
    _check(rows, weights, bias, target, wants)
    with torch.autocast(rows[0].device.type, enabled=False):
        if target is not None:
            check_targets(target, target < 0, weights[0].shape[0])
        counted = _counted(rows, weights, bias, target, scale, skips_ignored)
        logits = LinearLogits(rows, weights, bias, counted=counted)
        results = _empty(logits.rows, bias, dtype, wants)
        statistics = RowStatistics(Scores(scale, softcap), _taken(counted, target), *results)
        for chunk in logits.chunks:
            statistics.read(logits.of(chunk), chunk, results[0].dtype)
    found: Any = tuple(counted.put(each) if wanted else each for each, wanted in zip(results, wants, strict=True))
    return found


@linear_row_statistics.register_fake
def _(rows, weights, bias, target, scale, softcap, dtype, wants, skips_ignored):  # type: ignore[no-untyped-def]
    _check(rows, weights, bias, target, wants)
    return _empty(rows, bias, dtype, wants)


@opaque("linear_row_statistics_gradients")
def linear_row_statistics_gradients(
    upstream: list[Tensor],
    upstream_wants: Sequence[bool],
    logsumexp: Tensor,
    entropy: Tensor,
    rows: list[Tensor],
    weights: list[Tensor],
    bias: Tensor | None,
    target: Tensor | None,
    scale: float,
    softcap: float,
    skips_ignored: bool,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """Gradients of ``linear_row_statistics``.

    Args:
        upstream: gradients ``[N]`` of those of the first four results that ``upstream_wants`` names.
        logsumexp, entropy: as returned; without a logsumexp it is computed again where the entropy's gradient needs it.
        needs_grad: for rows, weights and bias, in that order.

    Returns:
        The gradients that are needed, in order, each of its operand's shape and dtype.
    """
    found = iter(upstream)
    with torch.autocast(rows[0].device.type, enabled=False):
        counted = _counted(rows, weights, bias, target, scale, skips_ignored)
        upstreams = [counted.take(next(found)) if wanted else None for wanted in upstream_wants]
        logits = LinearLogits(rows, weights, bias, needs_grad, counted)
        gradients = OperandGradients(logits, needs_grad)
        known = {
            name: counted.take(each) if each.numel() else each
            for name, each in (("logsumexp", logsumexp), ("entropy", entropy))
        }
        statistics = RowStatistics(Scores(scale, softcap), _taken(counted, target), **known)
        for chunk in logits.chunks:
            # No name holds the logits, which are to be freed before the gradients are rounded.
            gradients.add(chunk, statistics.write_gradient(logits.of(chunk), chunk, *upstreams))
        return gradients.results()


@linear_row_statistics_gradients.register_fake
def _(upstream, upstream_wants, logsumexp, entropy, rows, weights, bias, *others):  # type: ignore[no-untyped-def]
    return empty_gradients(rows, weights, bias, others[-1])


def _counted(
    rows: list[Tensor], weights: list[Tensor], bias: Tensor | None, target: Tensor | None, scale: float, skips: bool
) -> CountedRows:
    return counted_rows(rows, weights, [bias], target < 0 if skips and target is not None else None, scale)


def _taken(counted: CountedRows, rows: Tensor | None) -> Tensor | None:
    return None if rows is None else counted.take(rows)


def _empty(rows: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype, wants: Sequence[bool]) -> Any:
    work = accumulator_dtype(logits_dtype(rows, bias), dtype)
    dtypes = (work, work, work, work, torch.int64)
    count = rows[0].shape[0]
    return tuple(
        rows[0].new_empty(count if wanted else 0, dtype=each) for each, wanted in zip(dtypes, wants, strict=True)
    )


def _check(
    rows: list[Tensor], weights: list[Tensor], bias: Tensor | None, target: Tensor | None, wants: Sequence[bool]
) -> None:
    check_operands("linear_row_statistics", rows, weights, bias, target)
    if len(wants) != len(NAMES):
        raise ValueError(f"linear_row_statistics: wants must name {', '.join(NAMES)}, got {len(wants)}")
    if wants[1] and target is None:
        raise ValueError("linear_row_statistics: a target's logit needs a target")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, weights, bias, target, *ctx.settings, _, ctx.wants, skips_ignored = inputs
    ctx.settings.append(skips_ignored)
    logsumexp, _, _, entropy, argmax = output
    ctx.set_materialize_grads(False)
    unwanted = (each for each, wanted in zip(output[:4], ctx.wants, strict=False) if not wanted)
    ctx.mark_non_differentiable(argmax, *unwanted)
    ctx.count = len(rows)
    # Here the flags are still flat, one for each tensor of a list.
    ctx.needed = list(ctx.needs_input_grad[: 2 * ctx.count + 1])
    ctx.save_for_backward(logsumexp, entropy, *rows, *weights, bias, target)


def _backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    count = ctx.count
    results: list[Tensor | None] = [None] * (2 * count + 1)
    defined = [wanted and each is not None for each, wanted in zip(upstream[:4], ctx.wants, strict=False)]
    if any(defined):
        logsumexp, entropy, *operands = ctx.saved_tensors
        found = linear_row_statistics_gradients(
            [each for each, is_defined in zip(upstream, defined, strict=False) if is_defined],
            defined,
            logsumexp,
            entropy,
            operands[:count],
            operands[count : 2 * count],
            *operands[2 * count :],
            *ctx.settings,
            ctx.needed,
        )
        for place, gradient in zip((place for place, needed in enumerate(ctx.needed) if needed), found, strict=True):
            results[place] = gradient
    return results[:count], results[count : 2 * count], results[-1], *[None] * 6


linear_row_statistics.register_autograd(_backward, setup_context=_setup)
