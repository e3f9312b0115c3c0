"""What a loss wants of rows of logits, in torch operators: for CPUs, and what the Triton kernels do not serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """From logits ``x`` to what the softmax is taken of: ``scale * x``, or ``softcap * tanh(scale * x)``."""

    scale: float
    softcap: float

    def of(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """In ``dtype``; may be ``logits`` itself."""
        scores = logits.to(dtype)
        if self.scale != 1.0:
            scores = scores * self.scale
        return scores.tanh().mul_(self.softcap) if self.softcap else scores

    def gradient(self, gradient: Tensor, scores: Tensor) -> Tensor:
        """The gradient of the logits from that of the scores, in place."""
        if self.softcap:
            gradient.mul_((scores / self.softcap).square_().neg_().add_(1).mul_(self.softcap))
        return gradient.mul_(self.scale) if self.scale != 1.0 else gradient


@dataclass(frozen=True)
class CrossEntropy:
    """Losses of rows: ``nll * (logsumexp - z[target]) + spread * sum(class_weight * (logsumexp - z))``.

    ``nll`` and ``spread`` are by row, in the accumulators' dtype and zero in ignored rows, of which all gradients are
    zero; ``class_weight`` is None for ones and where there is no smoothing. ``factor`` multiplies the gradients.
    """

    scores: Scores
    target: Tensor
    nll: Tensor
    spread: Tensor | None
    class_weight: Tensor | None
    factor: Tensor

    def run(self, logits: Tensor, chunk: slice, losses: Tensor, predictions: Tensor | None, gradient: bool) -> Tensor:
        """Writes losses and predictions of the chunk; returns the logits' gradient, or the logits."""
        dtype = self.nll.dtype
        scores = self.scores.of(logits, dtype)
        if predictions is not None:
            predictions[chunk] = scores.argmax(1)
        nll, spread = self.nll[chunk], None if self.spread is None else self.spread[chunk]
        ignored = nll == 0 if spread is None else (nll == 0) & (spread == 0)
        target = self.target[chunk].masked_fill(ignored, 0)[:, None]
        logsumexp = scores.logsumexp(1)
        loss = nll * (logsumexp - scores.gather(1, target)[:, 0])
        shares = nll
        if spread is not None:
            if self.class_weight is None:
                weighted, total = scores.sum(1), float(scores.shape[1])
            else:
                weighted, total = scores @ self.class_weight, self.class_weight.sum()
            loss = loss + spread * (total * logsumexp - weighted)
            shares = shares + spread * total
        losses[chunk] = loss.masked_fill(ignored, 0)
        if not gradient:
            return logits
        factor = self.factor
        result = (scores - logsumexp[:, None]).exp_().mul_((factor * shares)[:, None])
        result.scatter_add_(1, target, -(factor * nll)[:, None])
        if spread is not None:
            of_all = (factor * spread)[:, None]
            result.sub_(of_all if self.class_weight is None else of_all * self.class_weight)
        return logits.copy_(self.scores.gradient(result, scores).masked_fill_(ignored[:, None], 0))


@dataclass(frozen=True)
class RowStatistics:
    """Results of ``linear_row_statistics``, each ``[N]``, or without elements or None where it is not wanted."""

    scores: Scores
    target: Tensor | None
    logsumexp: Tensor | None
    target_logit: Tensor | None
    sum: Tensor | None
    entropy: Tensor | None
    argmax: Tensor | None

    def read(self, logits: Tensor, chunk: slice) -> None:
        """Writes the chunk's statistics."""
        wanted = [each for each in (self.logsumexp, self.target_logit, self.sum, self.entropy) if _is_wanted(each)]
        scores = self.scores.of(logits, wanted[0].dtype if wanted else logits.dtype)
        if _is_wanted(self.target_logit):
            target = self.target[chunk]
            picked = scores.gather(1, target.clamp(min=0)[:, None])[:, 0]
            self.target_logit[chunk] = picked.masked_fill_(target < 0, 0)
        if _is_wanted(self.sum):
            self.sum[chunk] = scores.sum(1)
        if _is_wanted(self.argmax):
            self.argmax[chunk] = scores.argmax(1)
        if _is_wanted(self.logsumexp) or _is_wanted(self.entropy):
            logsumexp = scores.logsumexp(1)
            if _is_wanted(self.logsumexp):
                self.logsumexp[chunk] = logsumexp
            if _is_wanted(self.entropy):
                self.entropy[chunk] = torch.special.entr((scores - logsumexp[:, None]).exp_()).sum(1)

    def gradient(
        self,
        logits: Tensor,
        chunk: slice,
        of_logsumexp: Tensor | None,
        of_target: Tensor | None,
        of_sum: Tensor | None,
        of_entropy: Tensor | None,
    ) -> Tensor:
        """The gradient of the chunk's logits, written over them, from gradients ``[N]`` of the statistics."""
        work = next(each for each in (of_logsumexp, of_target, of_sum, of_entropy) if each is not None)
        scores = self.scores.of(logits, work.dtype)
        result = torch.zeros_like(scores)
        if of_logsumexp is not None or of_entropy is not None:
            shares = work.new_zeros(chunk.stop - chunk.start) if of_logsumexp is None else of_logsumexp[chunk]
            result = (scores - self.logsumexp[chunk, None]).exp_()
            if of_entropy is None:
                result.mul_(shares[:, None])
            else:
                # The gradient is -p (log p + H), whose first term is 0 where p is.
                each = torch.special.entr(result).mul_(of_entropy[chunk, None])
                result.mul_((shares - of_entropy[chunk] * self.entropy[chunk])[:, None]).add_(each)
        if of_sum is not None:
            result.add_(of_sum[chunk, None])
        if of_target is not None:
            target = self.target[chunk]
            values = of_target[chunk].masked_fill(target < 0, 0)
            result.scatter_add_(1, target.clamp(min=0)[:, None], values[:, None])
        return logits.copy_(self.scores.gradient(result, scores))


def _is_wanted(result: Tensor | None) -> bool:
    return result is not None and result.numel() > 0
