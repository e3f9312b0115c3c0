"""``packed_attention`` and what it needs once a batch: ``document_offsets`` and ``document_blocks``.

These operators are composites: AOTAutograd traces through them, so Inductor sees ``flex_attention`` or
``varlen_attention``, and plain operators for the metadata. A graph that has traced a pass holds them whole::

    cu_seqlens = torch.ops.glue.document_offsets(starts)  # for "varlen" on CUDA: exact_document_offsets
    blocks = torch.ops.glue.document_blocks(cu_seqlens, batch, length, is_causal, window)  # for "flex" alone
    out = torch.ops.glue.packed_attention(query, key, value, cu_seqlens, length, is_causal, window, scale, blocks)

``glue_compiler.ops.attention_choice`` says which of them to take.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from glue_compiler.compat import attention
from glue_compiler.ops import flex_tiles
from glue_compiler.ops.attention_choice import prefers_cudnn
from glue_compiler.ops.autocast import in_autocast_dtype
from glue_compiler.ops.composite import composite
from glue_compiler.ops.document_blocks import (
    BLOCK,
    block_lists,
    block_lists_of_seen,
    visibility,
    visible_range,
)
from glue_compiler.ops.kernel_support import next_power_of_two
from glue_compiler.ops.opaque import opaque
from glue_compiler.ops.varlen_attention import varlen_attention, varlen_attention_with_sinks

_LEAST_SIZE = 32
"""Documents that ``exact_document_offsets`` gives with ``few_sizes``."""


@composite("(Tensor starts) -> Tensor")
def document_offsets(starts: Tensor) -> Tensor:
    """Where each document of a packed batch begins, in its flattened tokens. No host synchronisation.

    Args:
        starts: bool ``[B, T]``: a document begins here. The first token of a row always begins one.

    Returns:
        int32 ``[B * T + 1]``, ascending, from 0 to ``B * T``; documents past the last are empty.
    """
    starts = _flat_starts(starts)
    tokens = starts.shape[0]
    token = torch.arange(tokens, device=starts.device, dtype=torch.int32)
    # Tokens that begin nothing are written to the last entry, which is tokens anyway.
    entry = torch.where(starts, starts.cumsum(0) - 1, tokens)
    offsets = torch.full((tokens + 1,), tokens, dtype=torch.int32, device=starts.device)
    return offsets.scatter(0, entry, torch.where(starts, token, tokens))


@opaque("exact_document_offsets")
def exact_document_offsets(starts: Tensor, few_sizes: bool = False) -> Tensor:
    """``document_offsets`` without empty documents: int32 ``[documents + 1]``.

    Its size is data-dependent: one host synchronisation on CUDA, an unbacked symbol in a graph. With ``few_sizes``
    empty documents make their number the next power of two, and 32 at least: CUDA graphs are recorded for each size.
    """
    _check_starts(starts)
    # Few kernels, each of which the whole step waits for: the last entry is the end of all.
    begins = starts.new_ones(starts.numel() + 1)
    begins[:-1].view(starts.shape)[:, 1:] = starts[:, 1:]
    offsets = torch.nonzero(begins).reshape(-1).to(torch.int32)
    if not few_sizes:
        return offsets
    documents = offsets.shape[0] - 1
    empty = max(_LEAST_SIZE, next_power_of_two(documents)) - documents
    return torch.nn.functional.pad(offsets, (0, empty), value=starts.numel())


@exact_document_offsets.register_fake
def _(starts: Tensor, few_sizes: bool = False) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size(min=1)
    return _flat_starts(starts).new_empty(size, dtype=torch.int32)


def _check_starts(starts: Tensor) -> None:
    if starts.dtype != torch.bool or starts.dim() != 2:
        raise ValueError(f"document_offsets: starts must be bool [B, T], got {starts.dtype}, {starts.dim()} dims")


def _flat_starts(starts: Tensor) -> Tensor:
    _check_starts(starts)
    column = torch.arange(starts.shape[1], device=starts.device)
    return (starts | (column == 0)).reshape(-1)


@composite(
    "(Tensor cu_seqlens, SymInt batch, SymInt length, bool is_causal, int window=-1, Tensor? seen=None) -> Tensor[]"
)
def document_blocks(
    cu_seqlens: Tensor, batch: int, length: int, is_causal: bool, window: int = -1, seen: Tensor | None = None
) -> list[Tensor]:
    """Which blocks of a packed batch's score matrix an attention kernel visits. No host synchronisation.

    Args:
        cu_seqlens: of ``document_offsets`` or ``exact_document_offsets``; row ends are document ends.
        batch: rows B. length: tokens T of a row.
        is_causal, window: as for ``packed_attention``.
        seen: bool ``[B, T]``: False for keys that no query sees, such as padding; None: there are none.

    Returns:
        First and last key that each query sees (int32 ``[B, T]`` each, within its row), then counts ``[B, 1, blocks]``
        and indices ``[B, 1, blocks, blocks]`` of four lists: for each block of queries the blocks of keys that are
        seen in part, and those seen in full; for each block of keys the same blocks of queries. ``seen`` comes last,
        if it was given. About ``16 * B * (T / 128)**2`` bytes.
    """
    first, last = visible_range(cu_seqlens, batch, length, is_causal, window)
    if seen is not None:
        listed = block_lists_of_seen if isinstance(length, int) else opaque_block_lists_of_seen
        return materialized([first, last, *listed(first, last, seen), seen])
    queries = block_lists(first, last)
    # Read by columns the mask is a range as well, of the queries that see a key.
    keys = block_lists(*visible_range(cu_seqlens, batch, length, is_causal, window, of_keys=True))
    return materialized([first, last, *queries, *keys])


@opaque("block_lists_of_seen")
def opaque_block_lists_of_seen(first: Tensor, last: Tensor, seen: Tensor) -> list[Tensor]:
    """:func:`block_lists_of_seen`, for lengths that are symbols: Inductor of torch 2.11 fails on the square of their
    number of blocks (``CantSplit``)."""
    return [each.contiguous() for each in block_lists_of_seen(first, last, seen)]


@opaque_block_lists_of_seen.register_fake
def _(first: Tensor, last: Tensor, seen: Tensor) -> list[Tensor]:
    batch, blocks = first.shape[0], (first.shape[1] + BLOCK - 1) // BLOCK
    counts, indices = first.new_empty(batch, 1, blocks), first.new_empty(batch, 1, blocks, blocks)
    return [torch.empty_like(each) for _ in range(4) for each in (counts, indices)]


@opaque("materialized")
def materialized(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous copies. To Inductor the operator is opaque, so they end in memory, with these strides.

    Inductor's flex_attention reads what a mask captures from memory, and fails on values that are not there yet. Lists
    of blocks it finds by the stride of their heads, even of a single one; where Inductor computes them itself that
    stride becomes 0, and every row of the batch reads the lists of the first.

    Gradients pass through as they are.
    """
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


@materialized.register_fake
def _(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def _as_they_are(context: Any, gradients: list[Tensor | None]) -> list[Tensor | None]:
    return gradients


materialized.register_autograd(_as_they_are)


@composite(
    "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, SymInt max_seqlen, bool is_causal, int window=-1, "
    "float? scale=None, Tensor[]? blocks=None, str implementation='flash2', Tensor? sinks=None) -> Tensor"
)
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    is_causal: bool,
    window: int = -1,
    scale: float | None = None,
    blocks: list[Tensor] | None = None,
    implementation: str = "flash2",
    sinks: Tensor | None = None,
) -> Tensor:
    """``scaled_dot_product_attention`` within the documents of a packed batch.

    Args:
        query: floating ``[B, Hq, T, D]``. key, value: ``[B, Hkv, T, D]``, ``Hq % Hkv == 0``. Any strides; those of a
            transposed ``[B, T, H, D]`` cost no copy.
        cu_seqlens: int32 ``[documents + 1]`` over the ``B * T`` flattened tokens; row ends are document ends.
        max_seqlen: at least the longest document's length; ``T`` always is.
        is_causal: a query sees no later key of its document.
        window: -1, or how far a query sees: ``0 <= q - k < window`` if causal, else ``|q - k| < window``.
        scale: multiplies the scores; None: ``1 / sqrt(D)``.
        blocks: of ``document_blocks`` with the same arguments: the kernel is then flex_attention, which only Inductor
            makes a kernel of. None: ``varlen_attention``. Queries that see no key at all get zeros, and so do their
            gradients, as under a boolean mask of ``scaled_dot_product_attention``.
        implementation: of ``varlen_attention``, without ``blocks``.
        sinks: floating ``[Hq]``, or what broadcasts to ``[B, Hq, T]`` or ``[B, Hq, T, 1]``: a score of one more key for
            each query, whose value is zero.

    Returns:
        ``[B, Hq, T, D]``, strides of a transposed ``[B, T, Hq, D]`` without ``blocks``.

    Gradients of query, key, value and sinks; with ``blocks`` they are deterministic.
    """
    query, key, value = in_autocast_dtype(query, key, value)
    batch, heads, length, size = query.shape
    scale = 1 / math.sqrt(size) if scale is None else scale
    if blocks is not None:
        first, last, *rest = blocks
        lists, seen = tuple(rest[:8]), tuple(rest[8:])
        ends = (first,) if is_causal else (first, last)
        with torch.autocast(query.device.type, enabled=False):
            q, k, v = as_flex_takes(query, key, value)
            out, logsumexp = attention.flex_attention(
                q, k, v, lists, BLOCK, visibility(is_causal), (*ends, *seen), scale, options=flex_tiles.of_call(q, 0)
            )
            if sinks is not None:
                out = beside_sinks(out, logsumexp, sinks_of_queries(sinks).to(logsumexp.dtype))
            return out.to(query.dtype)
    # What is not in this order is copied here, where a compiler writes it so in the first place.
    by_token = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
    flat = (tensor.view(batch * length, tensor.shape[2], size) for tensor in by_token)
    settings = (cu_seqlens, max_seqlen, is_causal, window, scale, implementation)
    if sinks is None:
        out, _ = varlen_attention(*flat, *settings)
    else:
        of_queries = sinks_of_queries(sinks)
        if sinks.dim() > 1:
            of_queries = of_queries.expand(batch, heads, length).transpose(0, 1).reshape(heads, batch * length)
        out = varlen_attention_with_sinks(*flat, of_queries, *settings)
    return out.view(batch, length, heads, size).transpose(1, 2)


def as_flex_takes(*operands: Tensor) -> list[Tensor]:
    """Off a GPU torch rounds the scores to the operands' dtype, which its kernel on one does not."""
    dtype = operands[0].dtype
    wide = dtype if operands[0].is_cuda else torch.promote_types(dtype, torch.float32)
    return [each.to(wide) for each in operands]


def sinks_of_queries(sinks: Tensor) -> Tensor:
    """``[Hq]``, or sinks of ``[B, Hq, T, 1]``, as what broadcasts to ``[B, Hq, T]``."""
    return sinks[:, None] if sinks.dim() == 1 else sinks[..., 0] if sinks.dim() == 4 else sinks


def beside_sinks(out: Tensor, logsumexp: Tensor, of_queries: Tensor) -> Tensor:
    """What is left of the result ``[B, Hq, T, D]`` of scores with this logsumexp ``[B, Hq, T]`` beside sinks."""
    return out * torch.sigmoid(logsumexp - of_queries).to(out.dtype)[..., None]


@composite("(Tensor query, Tensor key, Tensor value, float? scale=None) -> Tensor")
def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """``scaled_dot_product_attention(is_causal=True)`` that asks cuDNN first where that is the faster kernel.

    torch prefers FlashAttention 2, which takes twice as long as cuDNN on a Hopper GPU. Where cuDNN does not serve a
    call (its dtype, head size or device, deterministic algorithms), torch's own order holds.

    Args:
        query: ``[B, Hq, T, D]``. key, value: ``[B, Hkv, T, D]``, ``Hq % Hkv == 0``.
        scale: multiplies the scores; None: ``1 / sqrt(D)``.

    Returns:
        ``[B, Hq, T, D]``.
    """
    grouped = query.shape[1] != key.shape[1]
    asks_cudnn = prefers_cudnn(query.device, query.shape[2])
    with attention.cudnn_before_flash() if asks_cudnn else contextlib.nullcontext():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
