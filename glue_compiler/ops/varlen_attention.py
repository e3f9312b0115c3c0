"""``varlen_attention``: attention within the documents of a packed batch, forward and backward, and with sinks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from glue_compiler.compat import attention
from glue_compiler.compat.runtime import is_capturing
from glue_compiler.ops import flash_attn4
from glue_compiler.ops.kernel_support import accumulator_dtype
from glue_compiler.ops.opaque import opaque

_SMALL_QUERY = 12 << 20
"""Numbers: between 2,048 tokens (8.4M; the host is what a step waits for) and 4,096 (16.8M) of 32 heads of size 128."""


@opaque("varlen_attention")
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    is_causal: bool,
    window: int,
    scale: float,
    implementation: str = "flash2",
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each token to the tokens of its own document.

    Args:
        query: floating ``[tokens, Hq, D]``. key, value: ``[tokens, Hkv, D]`` of the same dtype, ``Hq % Hkv == 0``.
            Head ``h`` of the query reads head ``h // (Hq // Hkv)``.
        cu_seqlens: int32 ``[documents + 1]``, first token of each document, then ``tokens``; documents may be empty.
        max_seqlen: at least the longest document's length. On CUDA the grid of blocks grows with
            ``max_seqlen * documents``.
        is_causal: a query sees no later key.
        window: -1, or how far back a query sees: ``0 <= q - k < window`` if causal, else ``|q - k| < window``.
        scale: multiplies the scores.
        implementation: on CUDA, ``"flash2"`` or ``"flash4"``; small queries go to ``"flash2"`` all the same, which the
            host launches sooner, as do all where ``flash_attn4.unusable`` has a reason.

    Returns:
        ``[tokens, Hq, D]``, and the logsumexp of the scores ``[Hq, tokens]`` in fp32 (fp64 for fp64), which has no
        gradient. On CUDA without host synchronisation.

    Gradients of query, key and value. FlashAttention adds up the query's in no fixed order: two runs may differ in the
    last bits.

    Raises:
        ValueError: dimensions, sizes or dtypes that do not fit together.
        RuntimeError: on CUDA, what FlashAttention does not support: other dtypes than fp16 and bf16, head sizes over
            256 or not divisible by 8.

    Source: Dao, FlashAttention-2 (2023), on CUDA as torch ships it, and what ``flash_attn4`` names; on the CPU the
    textbook formula, one document after the other.
    """
    _check(query, key, value, cu_seqlens, window)
    if query.is_cuda:
        query, key, value = (tensor.contiguous() for tensor in (query, key, value))
        is_fast = _is_worth_flash4(query, implementation)
        forward = flash_attn4.forward if is_fast else attention.flash_varlen_forward
        return forward(query, key, value, cu_seqlens, max_seqlen, _sides(is_causal, window), scale)
    with torch.autocast("cpu", enabled=False):  # what runs below an operator still sees autocast
        return _reference(query, key, value, cu_seqlens, is_causal, window, scale)


@varlen_attention.register_fake
def _(query, key, value, cu_seqlens, max_seqlen, is_causal, window, scale, implementation="flash2"):  # type: ignore[no-untyped-def]
    _check(query, key, value, cu_seqlens, window)
    return torch.empty_like(query, memory_format=torch.contiguous_format), _new_logsumexp(query)


@opaque("varlen_attention_backward")
def varlen_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    is_causal: bool,
    window: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their shapes and dtypes; arguments as of ``varlen_attention``."""
    if query.is_cuda:
        grad, query, key, value = (tensor.contiguous() for tensor in (grad, query, key, value))
        is_fast = _is_worth_flash4(query, implementation)
        backward = flash_attn4.backward if is_fast else attention.flash_varlen_backward
        sides = _sides(is_causal, window)
        return backward(grad, query, key, value, out, logsumexp, cu_seqlens, max_seqlen, sides, scale)
    with torch.autocast("cpu", enabled=False):
        return _reference_backward(grad, query, key, value, out, logsumexp, cu_seqlens, is_causal, window, scale)


@varlen_attention_backward.register_fake
def _(grad, query, key, value, out, logsumexp, cu_seqlens, max_seqlen, is_causal, window, scale, implementation):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value))


def varlen_attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, cu_seqlens: Tensor, *settings: Any
) -> Tensor:
    """``varlen_attention``, whose softmax has one more key for each query, with a value of zero.

    Args:
        sinks: floating ``[Hq, tokens]`` or ``[Hq, 1]``, the score of that key. All others: as for ``varlen_attention``.

    Returns:
        ``[tokens, Hq, D]``.

    Gradients of query, key, value and sinks.
    """
    return _WithSinks.apply(query, key, value, sinks, cu_seqlens, *settings)


class _WithSinks(torch.autograd.Function):
    """The backward of FlashAttention knows of a softmax its logsumexp and the result: with those of the one that has
    the sinks it gives that one's gradients. Graphs hold what is around the kernels as plain operators."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *settings: Any) -> Tensor:
        out, logsumexp = varlen_attention(query, key, value, *settings)
        scores = sinks.to(logsumexp.dtype)
        out = (out * torch.sigmoid(logsumexp - scores).t()[..., None]).to(out.dtype)
        cu_seqlens, *ctx.settings = settings
        ctx.save_for_backward(query, key, value, out, torch.logaddexp(logsumexp, scores), cu_seqlens, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, cu_seqlens, sinks = ctx.saved_tensors
        gradients = varlen_attention_backward(grad, *saved, cu_seqlens, *ctx.settings)
        of_sinks = None
        if ctx.needs_input_grad[3]:
            out, logsumexp = saved[3:]
            weights = torch.exp(sinks.to(logsumexp.dtype) - logsumexp)
            reached = (grad.to(logsumexp.dtype) * out).sum(-1).t()
            of_sinks = -(weights * reached).sum_to_size(sinks.shape).to(sinks.dtype)
        return *gradients, of_sinks, *(None,) * 6


def _reference(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, is_causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    out, logsumexp = torch.empty_like(query, memory_format=torch.contiguous_format), _new_logsumexp(query)
    for rows in _documents(cu_seqlens):
        q, k, v = (_heads_first(tensor[rows]) for tensor in (query, key, value))
        scores = _scores(q, k, groups, is_causal, window, scale)
        logsumexp[:, rows] = scores.logsumexp(-1)
        probabilities = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        out[rows] = (probabilities @ v.repeat_interleave(groups, 0)).transpose(0, 1).to(out.dtype)
    return out, logsumexp


def _reference_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    gradients = (
        torch.zeros_like(query, memory_format=torch.contiguous_format),
        torch.zeros_like(key, memory_format=torch.contiguous_format),
        torch.zeros_like(value, memory_format=torch.contiguous_format),
    )
    for rows in _documents(cu_seqlens):
        g, q, k, v, o = (_heads_first(tensor[rows]) for tensor in (grad, query, key, value, out))
        probabilities = (_scores(q, k, groups, is_causal, window, scale) - logsumexp[:, rows].unsqueeze(-1)).exp()
        grad_probabilities = g @ v.repeat_interleave(groups, 0).transpose(-1, -2)
        grad_scores = probabilities * (grad_probabilities - (g * o).sum(-1, keepdim=True)) * scale
        found = (
            grad_scores @ k.repeat_interleave(groups, 0),
            _sum_groups(grad_scores.transpose(-1, -2) @ q, groups),
            _sum_groups(probabilities.transpose(-1, -2) @ g, groups),
        )
        for gradient, part in zip(gradients, found, strict=True):
            gradient[rows] = part.transpose(0, 1).to(gradient.dtype)
    return gradients


def _check(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, window: int) -> None:
    if query.dim() != 3 or key.dim() != 3 or key.shape != value.shape:
        raise ValueError(
            "varlen_attention: expected query [tokens, Hq, D] and key, value [tokens, Hkv, D], got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"varlen_attention: {query.shape[1]} query heads of size {query.shape[2]} and {key.shape[1]} key heads of "
            f"size {key.shape[2]}: sizes must be equal, and key heads divide query heads"
        )
    torch._check_value(query.shape[0] == key.shape[0], lambda: "varlen_attention: query and key differ in tokens")
    if not query.is_floating_point() or query.dtype != key.dtype or query.dtype != value.dtype:
        raise ValueError(
            f"varlen_attention: one floating dtype expected, got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"varlen_attention: cu_seqlens must be an int32 vector, got {cu_seqlens.dtype}, {cu_seqlens.dim()} dims"
        )
    if window != -1 and window < 1:
        raise ValueError(f"varlen_attention: window must be -1 or at least 1, got {window}")


def _is_worth_flash4(query: Tensor, implementation: str) -> bool:
    """Its Python takes 0.3 ms a call, which small steps wait for and captured ones do not."""
    is_worth = implementation == "flash4" and (query.numel() > _SMALL_QUERY or is_capturing())
    return is_worth and flash_attn4.unusable() is None  # imports the package


def _sides(is_causal: bool, window: int) -> tuple[int, int]:
    """FlashAttention's window: keys before and after the query's position, its own not counted."""
    before = window - 1 if window > 0 else -1
    return before, 0 if is_causal else before


def _new_logsumexp(query: Tensor) -> Tensor:
    return query.new_empty((query.shape[1], query.shape[0]), dtype=accumulator_dtype(query.dtype))


def _documents(cu_seqlens: Tensor) -> Iterator[slice]:
    offsets = cu_seqlens.tolist()
    return (slice(start, end) for start, end in itertools.pairwise(offsets) if end > start)


def _heads_first(tensor: Tensor) -> Tensor:
    """``[length, heads, size]`` → ``[heads, length, size]``, half precision in fp32."""
    return tensor.transpose(0, 1).to(accumulator_dtype(tensor.dtype))


def _scores(query: Tensor, key: Tensor, groups: int, is_causal: bool, window: int, scale: float) -> Tensor:
    scores = query @ key.repeat_interleave(groups, 0).transpose(-1, -2) * scale
    position = torch.arange(scores.shape[-1], device=scores.device)
    distance = position[:, None] - position
    hidden = distance < 0 if is_causal else torch.zeros_like(distance, dtype=torch.bool)
    if window > 0:
        hidden = hidden | (distance.abs() >= window)
    return scores.masked_fill(hidden, float("-inf"))


def _sum_groups(gradient: Tensor, groups: int) -> Tensor:
    return gradient.unflatten(0, (-1, groups)).sum(1)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, cu_seqlens = ctx.saved_tensors
    return *varlen_attention_backward(grad, *saved, cu_seqlens, *ctx.settings), *(None,) * 6


varlen_attention.register_autograd(_backward, setup_context=_setup_context)
