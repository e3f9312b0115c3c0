"""Triton kernels over rows of logits: one program for a row, which it reads once for statistics and once for gradients.

The gradient is written over the logits. Its pass walks backwards, so that what the first pass read last is still in the
L2 cache. Between the first columns and the stride of a row lie columns that nobody reads: they may be written, so that
every access is as wide as the hardware has it, whatever the number of classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from glue_compiler.ops.kernel_support import next_power_of_two

_LOG2_E = tl.constexpr(math.log2(math.e))


@dataclass(frozen=True)
class RowBlocks:
    """Columns that a program holds at a time, at most, and its warps."""

    columns: int
    warps: int

    def fitting(self, width: int) -> RowBlocks:
        """For rows of ``width`` columns: no more columns than those, and 16 or more of them for each thread."""
        columns = min(self.columns, next_power_of_two(width))
        return RowBlocks(columns, max(1, min(self.warps, columns // 512)))


BLOCKS = RowBlocks(8192, 16)


def _dense(vector: Tensor | None) -> Tensor | None:
    """As kernels read it: a gradient of a sum, say, is one number that is expanded."""
    return None if vector is None else vector.contiguous()


@triton.jit
def _scores(x, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Scores, and what their gradient is multiplied with for that of ``x``, but for a constant."""
    x = x.to(tl.float32)
    bend = 1.0
    if SCALED:
        x = x * scale
    if CAPPED:
        # tanh, by an exponential that may overflow to infinity or underflow to zero without harm.
        tanh = 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2_E)) + 1.0)
        x = softcap * tanh
        bend = 1.0 - tanh * tanh
    return x, bend


@triton.jit
def _read_row(
    row, width, stride, scale, softcap,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SUM: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest score (0 if that is minus infinity), the sum of exponentials beside it, and the statistics.

    Exponentials are summed lane by lane, so that only the largest score is a matter of the whole block.
    """
    columns = tl.arange(0, BLOCK)
    largest = float("-inf")
    place = 0
    exponentials = tl.zeros((BLOCK,), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    skew = tl.zeros((BLOCK,), dtype=tl.float32)
    x = tl.load(row + columns, mask=columns < stride, eviction_policy="evict_last")
    for start in range(0, width, BLOCK):
        inside = start + columns
        # The next block is on its way while this one is worked on.
        after = inside + BLOCK
        following = tl.load(row + after, mask=after < stride, eviction_policy="evict_last")
        z, _ = _scores(x, scale, softcap, SCALED, CAPPED)
        if SUM:
            total += tl.where(inside < width, z, 0.0)
        if start + BLOCK > width:
            z = tl.where(inside < width, z, float("-inf"))
        block_largest = tl.max(z, axis=0)
        if ARGMAX:  # noqa: SIM102  decided when the kernel is compiled
            if block_largest > largest:
                place = tl.min(tl.where(z == block_largest, inside, width), axis=0)
        before = largest
        largest = tl.maximum(largest, block_largest)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        kept = tl.exp2((before - base) * _LOG2_E)
        each = tl.exp2(z * _LOG2_E - base * _LOG2_E)
        if ENTROPY:
            moved = tl.where(before == float("-inf"), 0.0, before - base)
            skew = (skew + exponentials * moved) * kept + tl.where(each > 0.0, each * (z - base), 0.0)
        exponentials = exponentials * kept + each
        x = following
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return base, tl.sum(exponentials, axis=0), tl.sum(total, axis=0), tl.sum(skew, axis=0), place


@triton.jit
def _gradient(
    z, bend, base, share, constant, of_entropy,
    SHARES: tl.constexpr, CONSTANT: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """``bend * (share * p + constant - of_entropy * p * log p)``, where ``share`` holds what ``p`` is divided by."""
    result = tl.zeros_like(z)
    if SHARES:
        p = tl.exp2(z * _LOG2_E - base * _LOG2_E)
        result = p * share
        if ENTROPY:
            result -= tl.where(p > 0.0, of_entropy * p * (z - base), 0.0)
    if CONSTANT:
        result += constant
    return result * bend


@triton.jit
def _write_gradient(
    row, width, stride, scale, softcap, target, of_target, base, share, constant, of_entropy,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SHARES: tl.constexpr, TARGET: tl.constexpr, CONSTANT: tl.constexpr,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the row's logits over them; ``target`` names a column if it is not negative."""
    columns = tl.arange(0, BLOCK)
    if TARGET:
        logit = tl.load(row + tl.maximum(target, 0))
        score, bend_there = _scores(logit, scale, softcap, SCALED, CAPPED)
        at_target = _gradient(score, bend_there, base, share, constant, of_entropy, SHARES, CONSTANT, ENTROPY)
        at_target += of_target * bend_there
        # Nobody may write over the logit before all have read it.
        tl.debug_barrier()
    blocks = tl.cdiv(width, BLOCK)
    inside = (blocks - 1) * BLOCK + columns
    x = tl.load(row + inside, mask=inside < stride, eviction_policy="evict_first")
    for _ in range(blocks):
        after = inside - BLOCK
        following = tl.load(row + after, mask=after >= 0, eviction_policy="evict_first")
        z, bend = _scores(x, scale, softcap, SCALED, CAPPED)
        result = _gradient(z, bend, base, share, constant, of_entropy, SHARES, CONSTANT, ENTROPY)
        tl.store(row + inside, result.to(row.dtype.element_ty), mask=inside < stride, eviction_policy="evict_first")
        inside = after
        x = following
    if TARGET:
        # One column is written twice, by different threads.
        tl.debug_barrier()
        tl.store(row + target, at_target.to(row.dtype.element_ty), mask=target >= 0)


@triton.jit
def _cross_entropy_kernel(
    logits, targets, nll, spread, factor, losses, predictions, width, stride, scale, softcap, slope,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SPREAD: tl.constexpr, PREDICTS: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    of_target = tl.load(nll + index)
    of_all = 0.0
    if SPREAD:
        of_all = tl.load(spread + index)
    target = tl.load(targets + index)
    ignored = target < 0
    # A target out of bounds was reported; it is not read here.
    target = tl.where(ignored | (target >= width), 0, target).to(tl.int32)
    if (ignored == 0) | PREDICTS:
        base, exponentials, total, _, place = _read_row(
            row, width, stride, scale, softcap, SCALED, CAPPED, SPREAD, False, PREDICTS, BLOCK
        )
        if PREDICTS:
            tl.store(predictions + index, place.to(tl.int64))
        z, _ = _scores(tl.load(row + target), scale, softcap, SCALED, CAPPED)
        logsumexp = base + tl.log(exponentials)
        loss = of_target * (logsumexp - z)
        shares = of_target
        if SPREAD:
            loss += of_all * (width * logsumexp - total)
            shares += of_all * width
        tl.store(losses + index, tl.where(ignored, 0.0, loss))
        if GRADIENT:  # noqa: SIM102
            if not ignored:
                upstream = tl.load(factor) * slope
                _write_gradient(
                    row, width, stride, scale, softcap, target, -upstream * of_target,
                    base, upstream * shares / exponentials, -upstream * of_all, 0.0,
                    SCALED, CAPPED, True, True, SPREAD, False, BLOCK,
                )  # fmt: skip
    else:
        tl.store(losses + index, 0.0)
    if GRADIENT:  # noqa: SIM102
        if ignored:
            # A few logits stand for the row, which is not read: a hidden state that is not finite is seen in them.
            few = tl.arange(0, 32)
            z, _ = _scores(tl.load(row + few, mask=few < width), scale, softcap, SCALED, CAPPED)
            nothing = tl.sum(tl.where((few < width) & (z != float("-inf")), z * 0.0, 0.0), axis=0)
            tl.debug_barrier()  # nobody may write over it before all have read it
            columns = tl.arange(0, BLOCK)
            each = (tl.zeros((BLOCK,), dtype=tl.float32) + nothing).to(row.dtype.element_ty)
            for start in range(0, width, BLOCK):
                tl.store(row + start + columns, each, mask=start + columns < stride, eviction_policy="evict_first")


@triton.jit
def _statistics_kernel(
    logits, targets, logsumexps, target_logits, sums, entropies, places, width, stride, scale, softcap,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, LOGSUMEXP: tl.constexpr, TARGET: tl.constexpr, SUM: tl.constexpr,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    if TARGET:
        target = tl.load(targets + index)
        named = (target >= 0) & (target < width)
        z, _ = _scores(tl.load(row + tl.where(named, target, 0)), scale, softcap, SCALED, CAPPED)
        tl.store(target_logits + index, tl.where(named, z, 0.0))
    if LOGSUMEXP or SUM or ENTROPY or ARGMAX:
        base, exponentials, total, skew, place = _read_row(
            row, width, stride, scale, softcap, SCALED, CAPPED, SUM, ENTROPY, ARGMAX, BLOCK
        )
        if LOGSUMEXP:
            tl.store(logsumexps + index, base + tl.log(exponentials))
        if SUM:
            tl.store(sums + index, total)
        if ENTROPY:
            tl.store(entropies + index, tl.log(exponentials) - skew / exponentials)
        if ARGMAX:
            tl.store(places + index, place.to(tl.int64))


@triton.jit
def _statistics_gradient_kernel(
    logits, targets, logsumexps, shares, of_targets, of_sums, of_entropies, width, stride, scale, softcap, slope,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SHARES: tl.constexpr, TARGET: tl.constexpr, SUM: tl.constexpr,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    base = 0.0
    share = 0.0
    target = 0
    of_target = 0.0
    of_sum = 0.0
    of_entropy = 0.0
    if SHARES:
        base = tl.load(logsumexps + index)
        share = tl.load(shares + index) * slope
    if TARGET:
        target = tl.load(targets + index)
        target = tl.where(target < width, target, -1).to(tl.int32)
        of_target = tl.load(of_targets + index) * slope
    if SUM:
        of_sum = tl.load(of_sums + index) * slope
    if ENTROPY:
        of_entropy = tl.load(of_entropies + index) * slope
    _write_gradient(
        row, width, stride, scale, softcap, target, of_target, base, share, of_sum, of_entropy,
        SCALED, CAPPED, SHARES, TARGET, SUM, ENTROPY, BLOCK,
    )  # fmt: skip


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    nll: Tensor,
    spread: Tensor | None,
    factor: Tensor,
    losses: Tensor,
    predictions: Tensor | None,
    scale: float,
    softcap: float,
    gradient: bool,
    blocks: RowBlocks = BLOCKS,
) -> None:
    """Losses of ``row_losses.CrossEntropy`` without class weights; with ``gradient`` that is written over the logits.

    Args:
        logits: 16-bit or float32 ``[rows, V]``, dense rows. The columns up to its stride may be written.
        target: int64 ``[rows]``, negative where it is ignored. nll, spread: float32 ``[rows]``.
        factor: float32, one element.
        losses: float32 ``[rows]``, dense, as predictions are: int64 ``[rows]`` or None.
    """
    blocks = blocks.fitting(logits.shape[1])
    _cross_entropy_kernel[(logits.shape[0],)](
        logits, _dense(target), _dense(nll), _dense(spread), factor, losses, predictions,
        logits.shape[1], logits.stride(0), scale, softcap, scale * (softcap or 1.0),
        SCALED=scale != 1.0, CAPPED=softcap != 0.0, SPREAD=spread is not None, PREDICTS=predictions is not None,
        GRADIENT=gradient, BLOCK=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip


def statistics(
    logits: Tensor,
    target: Tensor | None,
    logsumexp: Tensor | None,
    target_logit: Tensor | None,
    total: Tensor | None,
    entropy: Tensor | None,
    argmax: Tensor | None,
    scale: float,
    softcap: float,
    blocks: RowBlocks = BLOCKS,
) -> None:
    """Writes the statistics of ``row_losses.RowStatistics`` that are not None, each ``[rows]``, in float32."""
    blocks = blocks.fitting(logits.shape[1])
    _statistics_kernel[(logits.shape[0],)](
        logits, _dense(target), logsumexp, target_logit, total, entropy, argmax, logits.shape[1], logits.stride(0),
        scale, softcap,
        SCALED=scale != 1.0, CAPPED=softcap != 0.0, LOGSUMEXP=logsumexp is not None, TARGET=target_logit is not None,
        SUM=total is not None, ENTROPY=entropy is not None, ARGMAX=argmax is not None,
        BLOCK=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip


def statistics_gradient(
    logits: Tensor,
    target: Tensor | None,
    logsumexp: Tensor | None,
    shares: Tensor,
    of_target: Tensor | None,
    of_sum: Tensor | None,
    of_entropy: Tensor | None,
    scale: float,
    softcap: float,
    blocks: RowBlocks = BLOCKS,
) -> None:
    """Writes over the logits: ``shares * p - of_entropy * p * log p + of_sum + of_target * onehot``, taken to them.

    All are float32 ``[rows]`` (``target`` int64, negative for none) or None for zeros. Without a ``logsumexp`` no share
    is read.
    """
    blocks = blocks.fitting(logits.shape[1])
    vectors = (_dense(each) for each in (target, logsumexp, shares, of_target, of_sum, of_entropy))
    _statistics_gradient_kernel[(logits.shape[0],)](
        logits, *vectors, logits.shape[1], logits.stride(0),
        scale, softcap, scale * (softcap or 1.0),
        SCALED=scale != 1.0, CAPPED=softcap != 0.0, SHARES=logsumexp is not None, TARGET=of_target is not None,
        SUM=of_sum is not None, ENTROPY=of_entropy is not None, BLOCK=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip
