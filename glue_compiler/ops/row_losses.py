"""What losses take from rows of logits: by Triton kernels on a GPU, else in torch operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glue_compiler.ops.kernel_support import runs_triton


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

    A row whose ``target`` is negative is ignored: its loss is 0, and its gradient too, or NaN where its scores are.
    ``nll`` and ``spread`` are by row, in the accumulators' dtype; ``class_weight`` is None for ones and where there is
    no smoothing. ``factor`` multiplies the gradients.
    """

    scores: Scores
    target: Tensor
    nll: Tensor
    spread: Tensor | None
    class_weight: Tensor | None
    factor: Tensor

    def run(self, logits: Tensor, chunk: slice, losses: Tensor, predictions: Tensor | None, gradient: bool) -> Tensor:
        """Writes losses and predictions of the chunk, with ``gradient`` that of the logits over them; returns those."""
        target, nll = self.target[chunk], self.nll[chunk]
        spread = None if self.spread is None else self.spread[chunk]
        losses, predictions = losses[chunk], None if predictions is None else predictions[chunk]
        if _runs_kernels(logits, nll.dtype) and self.class_weight is None:
            from glue_compiler.ops import row_losses_triton

            row_losses_triton.cross_entropy(
                logits, target, nll, spread, self.factor, losses, predictions,
                self.scores.scale, self.scores.softcap, gradient,
            )  # fmt: skip
            return logits
        scores = self.scores.of(logits, nll.dtype)
        if predictions is not None:
            predictions.copy_(scores.argmax(1))
        ignored, target = target < 0, target.clamp(min=0)[:, None]
        log_probs = scores.log_softmax(1)
        loss, of_target = -nll * log_probs.gather(1, target)[:, 0], self.factor * nll
        shares = of_target = of_target.masked_fill_(ignored, 0)  # also where the factor is infinite
        of_all = None
        if spread is not None:
            of_classes, total = log_probs.sum(1), spread.new_full((), scores.shape[1])
            if self.class_weight is not None:
                of_classes, total = log_probs @ self.class_weight, self.class_weight.sum()
            of_all = (self.factor * spread).masked_fill_(ignored, 0)
            loss, shares = loss - spread * of_classes, of_target + of_all * total
        losses.copy_(loss.masked_fill_(ignored, 0))
        if not gradient:
            return logits
        result = log_probs.exp_().mul_(shares[:, None])
        _add_at(result, target, -of_target)
        if of_all is not None:
            result.sub_(of_all[:, None] if self.class_weight is None else of_all[:, None] * self.class_weight)
        return logits.copy_(self.scores.gradient(result, scores))


@dataclass(frozen=True)
class RowStatistics:
    """Results of ``linear_row_statistics``, each ``[N]``, or without elements or None where it is not wanted."""

    scores: Scores
    target: Tensor | None
    logsumexp: Tensor | None = None
    target_logit: Tensor | None = None
    sum: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None

    def read(self, logits: Tensor, chunk: slice, work: torch.dtype) -> None:
        """Writes the chunk's statistics, which are in the dtype ``work``."""
        target = None if self.target is None else self.target[chunk]
        wanted = (
            each[chunk] if each is not None and each.numel() else None
            for each in (self.logsumexp, self.target_logit, self.sum, self.entropy, self.argmax)
        )
        logsumexp, target_logit, total, entropy, argmax = wanted
        if _runs_kernels(logits, work):
            from glue_compiler.ops import row_losses_triton

            row_losses_triton.statistics(
                logits, target, logsumexp, target_logit, total, entropy, argmax, self.scores.scale, self.scores.softcap
            )
            return
        scores = self.scores.of(logits, work)
        if target_logit is not None:
            assert target is not None
            picked = scores.gather(1, target.clamp(min=0)[:, None])[:, 0]
            target_logit.copy_(picked.masked_fill_(target < 0, 0))
        if total is not None:
            total.copy_(scores.sum(1))
        if argmax is not None:
            argmax.copy_(scores.argmax(1))
        if logsumexp is not None or entropy is not None:
            found = scores.logsumexp(1)
            if logsumexp is not None:
                logsumexp.copy_(found)
            if entropy is not None:
                entropy.copy_(torch.special.entr((scores - found[:, None]).exp_()).sum(1))

    def write_gradient(
        self,
        logits: Tensor,
        chunk: slice,
        of_logsumexp: Tensor | None,
        of_target: Tensor | None,
        of_sum: Tensor | None,
        of_entropy: Tensor | None,
    ) -> Tensor:
        """Writes the gradient of the chunk's logits over them, from gradients ``[N]`` of the statistics; returns it."""
        upstream = (each if each is None else each[chunk] for each in (of_logsumexp, of_target, of_sum, of_entropy))
        of_logsumexp, of_target, of_sum, of_entropy = upstream
        work = next(each for each in (of_logsumexp, of_target, of_sum, of_entropy) if each is not None)
        # By an entropy H the gradient is -p (log p + H): its second term is one more share of p.
        shares = work.new_zeros(work.shape) if of_logsumexp is None else of_logsumexp
        if of_entropy is not None:
            assert self.entropy is not None
            shares = shares - of_entropy * self.entropy[chunk]
        target = None if of_target is None or self.target is None else self.target[chunk]
        has_shares = of_logsumexp is not None or of_entropy is not None
        logsumexp = self._logsumexp(logits, chunk, work.dtype) if has_shares else None
        if _runs_kernels(logits, work.dtype):
            from glue_compiler.ops import row_losses_triton

            row_losses_triton.statistics_gradient(
                logits, target, logsumexp, shares, of_target, of_sum, of_entropy,
                self.scores.scale, self.scores.softcap,
            )  # fmt: skip
            return logits
        scores = self.scores.of(logits, work.dtype)
        if logsumexp is None:
            result = torch.zeros_like(scores)
        else:
            result = (scores - logsumexp[:, None]).exp_()
            each = None if of_entropy is None else torch.special.entr(result).mul_(of_entropy[:, None])
            result.mul_(shares[:, None])
            if each is not None:
                result.add_(each)
        if of_sum is not None:
            result.add_(of_sum[:, None])
        if of_target is not None:
            assert target is not None
            _add_at(result, target.clamp(min=0)[:, None], of_target.masked_fill(target < 0, 0))
        return logits.copy_(self.scores.gradient(result, scores))

    def _logsumexp(self, logits: Tensor, chunk: slice, work: torch.dtype) -> Tensor:
        """Of the chunk; computed again where it was not wanted, as an entropy's gradient may need it."""
        if self.logsumexp is not None and self.logsumexp.numel():
            return self.logsumexp[chunk]
        found = torch.empty(logits.shape[0], dtype=work, device=logits.device)
        RowStatistics(self.scores, None, logsumexp=found).read(logits, slice(0, logits.shape[0]), work)
        return found


def _add_at(matrix: Tensor, columns: Tensor, values: Tensor) -> None:
    """Adds a value to one element of each row; ``scatter_add_`` is not deterministic on a GPU."""
    matrix.scatter_(1, columns, matrix.gather(1, columns).add_(values[:, None]))


def _runs_kernels(logits: Tensor, work: torch.dtype) -> bool:
    return runs_triton(logits) and work == torch.float32 and logits.dtype != torch.float64
