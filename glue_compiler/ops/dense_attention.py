"""Attention with all of its scores in memory: what flex_attention's operator computes, of other operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Callable[..., Tensor],
    mask_tensors: tuple[Tensor, ...],
    scale: float,
    score: Callable[..., Tensor],
    score_tensors: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor]:
    """``compat.attention.flex_attention`` without lists of blocks, with gradients of ``score_tensors`` too.

    torch's own operator for a CPU gives none to tensors that a graph has computed: it asks them, when backward runs,
    whether they need one.

    Args:
        mask, score: given places of all scores at once, that are broadcast to ``[B, Hq, Q, K]``.

    Returns:
        ``[B, Hq, Q, D]``, and the logsumexp of the scores ``[B, Hq, Q]``. A query that sees no key gets zeros and minus
        infinity, and gives no gradients.
    """
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    places = [
        torch.arange(size, device=query.device).view([-1 if dim == own else 1 for dim in range(4)])
        for own, size in enumerate(scores.shape)
    ]
    scores = score(scores, *places, *score_tensors)
    scores = torch.where(mask(*places, *mask_tensors), scores, float("-inf"))
    is_empty = (scores == float("-inf")).all(-1)
    scores = scores.masked_fill(is_empty[..., None], 0.0)
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp[..., None]).exp().masked_fill(is_empty[..., None], 0.0)
    return weights @ value, logsumexp.masked_fill(is_empty, float("-inf"))
