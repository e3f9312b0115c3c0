"""FlashAttention 4, of the package ``flash-attn-4``, where that is installed: attention over packed documents.

Source: Dao et al., FlashAttention-4 (2026), whose CuTe kernels serve Hopper and later GPUs. They are compiled for each
head size, dtype and kind of mask when they are first called, not for lengths.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from glue_compiler.ops import optional_package

PACKAGE = "flash-attn-4"
_MODULE = "flash_attn.cute.interface"
_COMMON = {
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal", "window_size_left",
    "window_size_right",
}  # fmt: skip
_PARAMETERS = {
    "_flash_attn_fwd": {"q", "k", "v", "return_lse", *_COMMON},
    "_flash_attn_bwd": {"q", "k", "v", "out", "dout", "lse", *_COMMON},
}
"""Functions below the package's autograd, which an operator of ours has no use for, and what they must take."""


@functools.cache
def unusable() -> str | None:
    """Why the package cannot be used; None: it can. Imports it, which takes seconds, if it is installed."""
    return optional_package.why_unusable(PACKAGE, _MODULE, _PARAMETERS)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    window: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``[tokens, heads, size]`` → output, logsumexp fp32 ``[heads, tokens]``; arguments as of FlashAttention 2."""
    function = importlib.import_module(_MODULE)._flash_attn_fwd
    out, logsumexp, *_ = function(
        query, key, value, return_lse=True, **_arguments(cu_seqlens, max_seqlen, window, scale)
    )
    return out, logsumexp


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    window: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for :func:`forward`."""
    function = importlib.import_module(_MODULE)._flash_attn_bwd
    arguments = _arguments(cu_seqlens, max_seqlen, window, scale)
    return function(query, key, value, out, grad, logsumexp, **arguments)[:3]


def _arguments(cu_seqlens: Tensor, max_seqlen: int, window: tuple[int, int], scale: float) -> dict[str, Any]:
    before, after = (None if side < 0 else side for side in window)
    is_causal = before is None and after == 0
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size_left": None if is_causal else before,
        "window_size_right": None if is_causal else after,
    }
