"""How many floating-point operations glue's own operators do, for torch's ``FlopCounterMode`` and for plans of memory.

Formulas are given shapes, as torch's own are, and are registered with those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

import glue_compiler.ops.linear_cross_entropy
import glue_compiler.ops.varlen_attention  # noqa: F401  both register the operators

Shape = tuple[int, ...]

DOCUMENT = 2048
"""Tokens in a document where their number is not known when a graph is compiled: about what a token of a packed batch
for fine-tuning has before and behind it (``benchmarks.packed_attention.random_lengths``)."""


@register_flop_formula(torch.ops.glue.varlen_attention)
def varlen_attention_flops(
    query: Shape, key: Shape, value: Shape, cu_seqlens: Shape | None, *settings: Any, **result: Any
) -> int:
    """Of the products of queries with keys, and of weights with values; arguments as the operator has them.

    An estimate: all documents count as if they had one length.
    """
    return 2 * _product(query, cu_seqlens, *settings)


@register_flop_formula(torch.ops.glue.varlen_attention_backward)
def varlen_attention_backward_flops(
    grad: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    out: Shape,
    logsumexp: Shape,
    cu_seqlens: Shape | None,
    *settings: Any,
    **result: Any,
) -> int:
    """Scores once more, and four products for the gradients of weights, queries, keys and values."""
    return 5 * _product(query, cu_seqlens, *settings)


def _product(query: Shape, cu_seqlens: Shape | None, max_seqlen: int, is_causal: bool, window: int, *_: Any) -> int:
    """One product over all pairs of a query and a key that it sees."""
    tokens, heads, size = query
    documents = cu_seqlens[0] - 1 if cu_seqlens else 0
    length = min(max_seqlen, tokens // documents if documents > 0 else DOCUMENT)
    seen = length // 2 if is_causal else length
    if window > 0:
        seen = min(seen, window if is_causal else 2 * window)
    return 2 * tokens * heads * size * max(1, seen)


@register_flop_formula(torch.ops.glue.linear_cross_entropy)
def linear_cross_entropy_flops(
    rows: Sequence[Shape], weights: Sequence[Shape], *others: Any, out_shape: Any = None
) -> int:
    """Of the logits, and of each gradient of rows or weights that forward makes; arguments as the operator has them."""
    needs_grad = others[-2]
    makes_none = out_shape is not None and not out_shape[2]  # float16's, which backward makes
    return _products_of(rows, weights, () if makes_none else needs_grad)


@register_flop_formula(torch.ops.glue.linear_cross_entropy_gradients)
def linear_cross_entropy_gradients_flops(
    upstream: Shape, rows: Sequence[Shape], weights: Sequence[Shape], *others: Any, **result: Any
) -> int:
    """The logits once more, and each gradient that is asked for."""
    return _products_of(rows, weights, others[-1])


def _products_of(rows: Sequence[Shape], weights: Sequence[Shape], needs_grad: Sequence[bool]) -> int:
    """Of the logits, and of the gradients of rows and of weights, in this order, that are needed; none of a bias."""
    products = [2 * row[0] * row[1] * weight[0] for row, weight in zip(rows, weights, strict=True)]
    made = zip((*products, *products), needs_grad, strict=False)
    return sum(products) + sum(flops for flops, is_needed in made if is_needed)
