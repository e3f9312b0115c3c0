"""FlashAttention 4, of the package ``flash-attn-4``, where that is installed: attention over packed documents.

Source: Dao et al., FlashAttention-4 (2026), whose CuTe kernels serve Hopper and later GPUs. They are compiled for each
head size, dtype and kind of mask when they are first called, not for lengths.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from glue_compiler.compat import inductor
from glue_compiler.ops import optional_package

PACKAGE = "flash-attn-4"
_LEAST = "4.0.0b5"
"""Those before it refuse sm_120."""
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
_ON_DISK = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@functools.cache
def is_installed() -> bool:
    """Imports nothing: what is compiled for small batches alone never waits for the package."""
    return optional_package.why_absent(PACKAGE, _LEAST) is None


@functools.cache
def unusable() -> str | None:
    """Why the package cannot be used; None: it can. Imports it, which takes seconds, if it is installed."""
    with _kernels_kept_on_disk():
        return optional_package.why_unusable(PACKAGE, _LEAST, _MODULE, _PARAMETERS)


@contextlib.contextmanager
def _kernels_kept_on_disk() -> Iterator[None]:
    """Where the package is imported in here, its kernels are found by later processes, as Inductor's are.

    It reads two variables of the environment when it is imported, and keeps nothing by default: ten seconds of each
    process. Who has set one of them, or has imported it, has decided.
    """
    is_decided = _MODULE in sys.modules or any(name in os.environ for name in _ON_DISK)
    is_installed = optional_package.installed_version(PACKAGE) is not None
    folder = _folder() if is_installed and not is_decided else None
    if folder is not None:
        os.environ.update(zip(_ON_DISK, ("1", folder), strict=True))
    try:
        yield
    finally:
        if folder is not None:
            for name in _ON_DISK:
                os.environ.pop(name, None)


def _folder() -> str | None:
    """For the kernels; None: it cannot be made, and the package would fail on that."""
    try:
        around = inductor.inductor_cache_folder()
        if around is None:
            return None
        folder = os.path.join(around, "flash_attn4")
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


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
