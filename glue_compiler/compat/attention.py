"""Attention kernels inside torch: FlashAttention over packed documents, flex_attention's operator, sdpa's backends."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from glue_compiler.compat import saved_tensor_hooks
from glue_compiler.compat.versions import torch_version


def has_sdpa_backward(result: Tensor) -> bool:
    """Does Inductor compile the backward of an sdpa with this result? Not in fp64 on a CPU in 2.11."""
    return torch_version() > (2, 11) or result.dtype != torch.float64 or result.device.type != "cpu"


def has_flex_gradient(device: torch.device, sizes: Iterable[int | torch.SymInt]) -> bool:
    """Does Inductor compile flex_attention with gradients of a tensor of ``sizes`` that its scores read?

    Not for symbols in 2.11 and 2.13: it lowers the gradient's graph as a part of the whole, and takes what is on record
    of the whole for a size. Elsewhere than on a GPU it does not come to that.
    """
    return device.type != "cuda" or all(isinstance(size, int) for size in sizes)


@dataclass(frozen=True)
class FlexForward:
    """Queries and keys in a block of flex_attention's forward."""

    rows: int
    columns: int
    stages: int
    warps: int

    def options(self) -> dict[str, int]:
        """As the operator takes them."""
        names = ("BLOCK_M", "BLOCK_N", "num_stages", "num_warps")
        return {f"fwd_{name}": value for name, value in zip(names, astuple(self), strict=True)}


@dataclass(frozen=True)
class FlexBackward:
    """Queries and keys in a block of flex_attention's backward: one half walks queries, the other keys."""

    rows_walked: int
    columns_kept: int
    rows_kept: int
    columns_walked: int
    stages: int
    warps: int

    def options(self) -> dict[str, int]:
        """As the operator takes them."""
        names = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps")
        return {f"bwd_{name}": value for name, value in zip(names, astuple(self), strict=True)}


class FlexKernels(NamedTuple):
    """Those of which Inductor takes the fastest that runs: one of each, unless it tunes them."""

    forward: list[FlexForward]
    backward: list[FlexBackward]


def flex_kernels(head_size: int, dtype: torch.dtype) -> FlexKernels:
    """What Inductor chooses for the current CUDA device."""
    choices = importlib.import_module("torch._inductor.virtualized").V.choices
    return FlexKernels(
        [
            FlexForward(each.block_m, each.block_n, each.num_stages, each.num_warps)
            for each in choices.get_flex_attention_fwd_configs(head_size, dtype, "cuda")
        ],
        [
            FlexBackward(each.block_m1, each.block_n1, each.block_m2, each.block_n2, each.num_stages, each.num_warps)
            for each in choices.get_flex_attention_bwd_configs(head_size, dtype, "cuda")
        ],
    )


def flash_varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    window: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """FlashAttention over packed documents. ``[tokens, heads, size]`` → output, logsumexp fp32 ``[heads, tokens]``.

    ``window``: how many keys before and after its own position a query sees, -1 for all.
    """
    # torch.nn.attention.varlen keeps its logsumexp to itself in 2.11; the ATen operators below it have had these
    # arguments in all supported versions.
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        0.0,
        window == (-1, 0),
        False,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return out, logsumexp


def flash_varlen_backward(
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
    """Gradients of query, key and value for :func:`flash_varlen_forward`."""
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # read only with dropout
    return torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        logsumexp,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        0.0,
        window == (-1, 0),
        random_state,
        torch.empty(0, device=query.device),
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: tuple[Tensor, ...],
    block: int,
    mask: Callable[..., Tensor],
    mask_tensors: tuple[Tensor, ...],
    scale: float,
    score: Callable[..., Tensor] | None = None,
    score_tensors: tuple[Tensor, ...] = (),
    options: Mapping[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """flex_attention's operator itself, for graphs that are being traced; Inductor makes the kernel.

    The public function compiles itself when it is called outside of Dynamo, and takes what its mask reads by closure;
    both are impossible while AOTAutograd traces.

    Args:
        query: ``[B, Hq, Q, D]``. key, value: ``[B, Hkv, K, D]``.
        lists: counts and indices of the visited blocks, in the order of ``BlockMask``: keys of a query block with a
            mask, without one, then queries of a key block with a mask, without one.
        block: tokens in a block.
        mask: ``(batch, head, query, key, *mask_tensors)`` → bool; read in blocks with a mask alone.
        scale: multiplies the scores.
        score: ``(score, batch, head, query, key, *score_tensors)`` → what takes the place of a scaled score.
        options: for the kernels, of :class:`FlexForward` and :class:`FlexBackward`.

    Returns:
        ``[B, Hq, Q, D]``, and the logsumexp of the scores, fp32 (fp64 for fp64) ``[B, Hq, Q]``, to the base of e.
    """
    # Of the same name as the package's function, so an attribute of the package would be that.
    module = importlib.import_module("torch.nn.attention.flex_attention")
    operator = importlib.import_module("torch._higher_order_ops.flex_attention").flex_attention
    lengths = (query.shape[2], key.shape[2])
    # A BlockMask orders its own parts: 2.13 added some.
    # Functions are traced with their annotations, and as strings they keep Inductor's cache from hashing the graph.
    block_mask = module.BlockMask(lengths, *lists, BLOCK_SIZE=(block, block), mask_mod=lambda *places: mask(*places))
    score_mod = module._identity if score is None else lambda *given: score(*given)
    # AUTO would take a decoding kernel for short rows.
    given = {"BACKEND": "TRITON", **(options or {})}
    applied = module._apply_kernel_options(query, key, value, False, given)
    # The operator traces the gradient of its scores with autograd, where a checkpoint around an eager call would take
    # what that saves for the forward's own, and compute it again in the middle of it.
    is_hooked = score is not None and saved_tensor_hooks.are_active()
    with saved_tensor_hooks.out_of_sight() if is_hooked else contextlib.nullcontext():
        out, logsumexp, *_ = operator(
            query, key, value, score_mod, block_mask.as_tuple(), scale, applied, score_tensors, mask_tensors
        )
    return out, logsumexp * math.log(2)  # it is to the base of 2


def most_score_bytes(device: torch.device) -> float:
    """That a kernel may read for each score: more than four were not tried for room in shared memory."""
    return 4 if device.type == "cuda" else math.inf


def cudnn_before_flash() -> AbstractContextManager[Any]:
    """``scaled_dot_product_attention`` takes cuDNN where it supports the call, then its usual order."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
