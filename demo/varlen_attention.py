"""Attention over packed documents, in the form in which variable-length kernels want it.

Each call derives ``cu_seqlens`` and ``max_seqlen`` from ``position_ids``: a ``nonzero`` and an ``.item()``, both of
which wait for the device, in every layer of every step. That is what glue's ``hoist_metadata`` is for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn


def document_bounds(position_ids: Tensor) -> tuple[Tensor, int]:
    """Where documents begin and end in a packed row.

    Args:
        position_ids: integer ``[1, tokens]``, 0 at the first token of each document.

    Returns:
        ``cu_seqlens``, int32 ``[documents + 1]``: cumulative document lengths, from 0 to ``tokens``; and the longest
        document's length.
    """
    positions = position_ids.flatten()
    starts = (positions == 0).nonzero().flatten()
    cu_seqlens = torch.cat((starts, starts.new_full((1,), positions.numel()))).to(torch.int32)
    max_seqlen = cu_seqlens.diff().max().item()
    return cu_seqlens, int(max_seqlen)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """Causal attention within each document: torch's kernel on CUDA in half precision, else an exact dense form.

    Args:
        query: ``[tokens, heads, head_dim]``; ``key`` and ``value`` too.
        cu_seqlens: int32 ``[documents + 1]``.
        max_seqlen: the longest document's length.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        # The window (-1, 0) is "causal" in every torch that has the kernel; the keyword for it changed.
        window = (-1, 0)
        output: Any = varlen_attn(
            query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=window
        )
        return output
    token = torch.arange(query.shape[0], device=query.device)
    document = torch.bucketize(token, cu_seqlens[1:], right=True)
    distance = token[:, None] - token
    mask = (document[:, None] == document) & (distance >= 0) & (distance < max_seqlen)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)[0].transpose(0, 1)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    position_ids: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers' ``AttentionInterface``.

    Args:
        query: ``[1, heads, tokens, head_dim]``; ``key`` and ``value`` with fewer heads, each shared by several.

    Returns:
        ``[1, tokens, heads, head_dim]``, and None for the attention weights.
    """
    shared_by = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared_by, dim=1) for x in (key, value))
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    cu_seqlens, max_seqlen = document_bounds(position_ids)
    return varlen_attention(query, key, value, cu_seqlens, max_seqlen, scaling)[None], None
