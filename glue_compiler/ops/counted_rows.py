"""Which rows a loss computes: an ignored one has no part in it, and need not be multiplied with a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CountedRows:
    """Rows ``[height, ...]`` in the order in which they are computed: the first ``count`` of ``order`` count.

    Attributes:
        order: int64 indices, each once; rows that it does not name are not computed. None: all, as they are.
    """

    height: int
    count: int
    order: Tensor | None = None

    def take(self, rows: Tensor) -> Tensor:
        """The rows that are computed, in their order."""
        return rows if self.order is None else rows[self.order]

    def put(self, found: Tensor) -> Tensor:
        """The inverse of :meth:`take`, of as many rows as there are in ``found``: zeros where nothing was computed."""
        if self.order is None:
            return found
        return found.new_zeros(self.height, *found.shape[1:]).index_copy_(0, self.order[: found.shape[0]], found)


def counted_rows(
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    others: Sequence[Tensor | None],
    ignored: Tensor | None,
    scale: float,
    computes_all: bool = False,
) -> CountedRows:
    """Rows that are not ``ignored``, and those whose logits may not be finite, which makes gradients NaN all the same.

    Args:
        rows, weights: as for ``linear_cross_entropy``. others: what is added to logits, or multiplies their gradient.
        ignored: bool ``[N]``; None: no row.
        computes_all: whether ignored rows are to be computed too, behind those that count.

    On a CPU alone: how many rows count is not known elsewhere without a synchronisation.
    """
    height = rows[0].shape[0]
    if ignored is None or ignored.device.type != "cpu" or not ignored.any():
        return CountedRows(height, height)
    counts = ~ignored | ~_has_finite_logits(rows, weights, others, scale)
    kept = counts.nonzero()[:, 0]
    if kept.numel() == height:
        return CountedRows(height, height)
    order = torch.cat([kept, counts.logical_not().nonzero()[:, 0]]) if computes_all else kept
    return CountedRows(height, kept.numel(), order)


def _has_finite_logits(
    rows: Sequence[Tensor], weights: Sequence[Tensor], others: Sequence[Tensor | None], scale: float
) -> Tensor:
    """Of each row, by a bound: what its numbers' magnitudes add up to, times the largest of a weight."""
    added = [each for each in others if each is not None]
    reach = sum(map(_largest, added), rows[0].new_zeros((), dtype=torch.float64))
    for each, weight in zip(rows, weights, strict=True):
        reach = reach + torch.linalg.vector_norm(each, 1, dim=1, dtype=torch.float64) * _largest(weight)
    limit = min(torch.finfo(each.dtype).max for each in (*rows, *added))
    return reach * max(1.0, abs(scale)) < limit / 2  # half is left to roundings; false of NaN


def _largest(tensor: Tensor) -> Tensor:
    """Magnitude, in float64. ``vector_norm`` takes seven times as long."""
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float64)
    least, most = torch.aminmax(tensor)
    return torch.maximum(-least, most).double()
