"""Attention written out as old BART does it: rows and heads are one dimension for its products."""

import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import LENGTH

B, H, T = 2, 3, LENGTH
CAUSAL, PACKED, LISTED, UNMASKED = ({form: 1} for form in ("causal", "packed", "listed", "unmasked"))
UNREAD = "not of query, key and value"
CHANGED = "changed in another way"
LOWEST = torch.finfo(torch.float64).min


def causal(length=T):
    token = torch.arange(length)
    return token[:, None] >= token


def added(visible, low=LOWEST):
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, low)


def merged(tensor):
    rows, heads, _, size = tensor.shape
    return tensor.reshape(rows * heads, -1, size)


def merged_otherwise(tensor):
    return merged(tensor.transpose(0, 1))


def product(left, right):
    return torch.bmm(left, right.transpose(1, 2))


def on_heads(change, rows=B, heads=H):
    """``change``, of scores ``[B, H, T, S]``, for ``[B * H, T, S]``."""

    def of_merged(scores):
        return change(scores.view(rows, heads, *scores.shape[1:])).view(scores.shape)

    return of_merged


def unchanged(tensor):
    return tensor


def with_mask(scores):
    return on_heads(lambda s: s + added(causal()))(scores)


def between(
    change=with_mask,
    *,
    weigh=lambda scores: F.softmax(scores, -1),
    query=merged,
    key=merged,
    value=merged,
    of_scores=product,
    of_result=torch.bmm,
    end=lambda out: out.view(B, H, T, -1).transpose(1, 2).flatten(2),
):
    """Attention as BART of transformers 4 writes it, and those that were copied from it."""

    def fn(q, k, v):
        return end(of_result(weigh(change(of_scores(query(q), key(k)))), value(v)))

    return fn
