"""``block_sparse_attention``: attention under a boolean mask, over lists of its blocks, as one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glue_compiler.ops import flash_attn4


@torch.library.custom_op("glue::block_sparse_attention", mutates_args=())
def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, lists: list[Tensor], hides: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention to the keys that a mask shows.

    Args:
        query: floating ``[B, Hq, Q, D]``. key, value: ``[B, Hkv, K, D]`` of the same dtype, ``Hq % Hkv == 0``.
        mask: bool ``[B, Hq, Q, K]``, any strides, of expanded dimensions 0.
        lists: the first eight of ``mask_blocks`` for this mask.
        hides: True hides a key, else it shows it.
        scale: multiplies the scores.

    Returns:
        ``[B, Hq, Q, D]`` with the strides of a transposed ``[B, Q, Hq, D]``; zeros for queries that see no key. The
        logsumexp of the scores, fp32 (fp64 for fp64) ``[B, Hq, Q]``, which has no gradient.

    Gradients of query, key and value; the query's is added up in no fixed order.

    Raises:
        RuntimeError: on CUDA, what ``flash_attn4`` does not support.

    Source: on CUDA ``flash_attn4``; on the CPU the textbook formula, which reads the mask alone.
    """
    if query.is_cuda:
        query, key, value = _tokens_first(query, key, value)
        out, logsumexp = flash_attn4.masked_forward(query, key, value, mask, lists, hides, scale)
        return out.transpose(1, 2), logsumexp
    with torch.autocast("cpu", enabled=False):  # what runs below an operator still sees autocast
        scores, logsumexp = _scores(query, key, mask, hides, scale)
        out = _probabilities(scores, logsumexp) @ _repeated(value, query)
        return _like(query, out), logsumexp


@block_sparse_attention.register_fake
def _(query, key, value, mask, lists, hides, scale):  # type: ignore[no-untyped-def]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _like(query), query.new_empty(query.shape[:3], dtype=dtype)


@torch.library.custom_op("glue::block_sparse_attention_backward", mutates_args=())
def block_sparse_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor,
    lists: list[Tensor],
    hides: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; arguments as of ``block_sparse_attention``."""
    if query.is_cuda:
        grad, query, key, value, out = _tokens_first(grad, query, key, value, out)
        found = flash_attn4.masked_backward(grad, query, key, value, out, logsumexp, mask, lists, hides, scale)
        return tuple(each.transpose(1, 2) for each in found)  # type: ignore[return-value]
    with torch.autocast("cpu", enabled=False):
        scores, _ = _scores(query, key, mask, hides, scale)
        probabilities = _probabilities(scores, logsumexp)
        wide = grad.to(scores.dtype)
        of_probabilities = wide @ _repeated(value, query).transpose(-1, -2)
        of_scores = probabilities * (of_probabilities - (wide * out).sum(-1, keepdim=True)) * scale
        groups = (query.shape[1] // key.shape[1], -1)
        return (
            _like(query, of_scores @ _repeated(key, query)),
            _like(key, (of_scores.transpose(-1, -2) @ query.to(scores.dtype)).unflatten(1, groups[::-1]).sum(2)),
            _like(value, (probabilities.transpose(-1, -2) @ wide).unflatten(1, groups[::-1]).sum(2)),
        )


@block_sparse_attention_backward.register_fake
def _(grad, query, key, value, out, logsumexp, mask, lists, hides, scale):  # type: ignore[no-untyped-def]
    return _like(query), _like(key), _like(value)


def _tokens_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``[B, T, H, D]``, contiguous."""
    return tuple(tensor.transpose(1, 2).contiguous() for tensor in tensors)


def _like(tensor: Tensor, content: Tensor | None = None) -> Tensor:
    """Of the shape and dtype of ``tensor``, and the strides of a transposed ``[B, T, H, D]``."""
    batch, heads, tokens, size = tensor.shape
    made = tensor.new_empty(batch, tokens, heads, size).transpose(1, 2)
    return made if content is None else made.copy_(content)


def _scores(query: Tensor, key: Tensor, mask: Tensor, hides: bool, scale: float) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(dtype) @ _repeated(key, query).transpose(-1, -2) * scale
    scores = scores.masked_fill(mask if hides else ~mask, float("-inf"))
    return scores, scores.logsumexp(-1)


def _probabilities(scores: Tensor, logsumexp: Tensor) -> Tensor:
    is_empty = (logsumexp == float("-inf"))[..., None]
    return (scores - logsumexp[..., None]).exp().masked_fill(is_empty, 0)


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return tensor.to(dtype).repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, lists, ctx.hides, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, mask, *lists)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, out, logsumexp, mask, *lists = ctx.saved_tensors
    found = block_sparse_attention_backward(grad, query, key, value, out, logsumexp, mask, lists, ctx.hides, ctx.scale)
    return *found, None, [None] * len(lists), None, None


block_sparse_attention.register_autograd(_backward, setup_context=_setup_context)
