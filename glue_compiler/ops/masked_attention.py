"""``masked_attention``: attention under any mask, which visits only the blocks that ``mask_blocks`` found in it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from glue_compiler.compat import attention
from glue_compiler.ops import flex_tiles
from glue_compiler.ops.autocast import in_autocast_dtype
from glue_compiler.ops.composite import composite
from glue_compiler.ops.dense_attention import dense_attention
from glue_compiler.ops.document_blocks import BLOCK
from glue_compiler.ops.mask_blocks import as_four, to_whole_blocks
from glue_compiler.ops.packed_attention import as_flex_takes, beside_sinks, sinks_of_queries


@composite(
    "(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor[] lists, str kind, str empty_rows, "
    "float? scale=None, float? softcap=None, Tensor? sinks=None, Tensor? bias=None, Tensor? factors=None, "
    "bool in_whole_blocks=False) -> Tensor"
)
def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    lists: list[Tensor],
    kind: str,
    empty_rows: str,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    in_whole_blocks: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` under a mask of which whole blocks hide everything.

    Args:
        query: floating ``[B, Hq, Q, D]``. key, value: ``[B, Hkv, K, D]``, ``Hq % Hkv == 0``.
        mask: as for ``mask_blocks``. Kernels read it from memory, in backward too: what is no input of a graph goes
            through ``glue::materialized`` first, or Inductor may compute it again in backward, where flex_attention
            fails on values that are not in memory.
        lists: of ``mask_blocks`` for the same mask (without its gradient), kind and empty rows; beside a bias
            followed by ``row_offsets`` of the mask and it.
        kind: what an element of the mask says, of ``mask_blocks.Kind``.
        empty_rows: what a query gets that sees no key, of ``mask_blocks.EmptyRows``. Of numbers that are added only
            minus infinities make an empty row, and a mean of such a row is not defined.
        scale: multiplies the scores; None: ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask.
        sinks: floating ``[Hq]``, or what broadcasts to ``[B, Hq, Q]`` or ``[B, Hq, Q, 1]``: a score of one more key for
            each query, whose value is zero.
        bias: floating, broadcastable to ``[B, Hq, Q, K]``: is added to the scores beside a boolean mask, in memory as
            that is.
        factors: bool or floating without a gradient, broadcastable to ``[B, Hq, Q, K]``: multiplies the scores before
            numbers are added to them, of ``kind="added"`` alone, in memory as the mask is. Where it is False or NaN, a
            score is zero, whatever it was.
        in_whole_blocks: the mask is one of ``mask_in_whole_blocks``, without a gradient, a bias or factors beside it,
            and not of booleans whose empty rows get a mean; the lists are of that mask and its sizes.

    Returns:
        ``[B, Hq, Q, D]``.

    Gradients of query, key, value and sinks, and of numbers that are added, of the mask or the bias: kernels sum those
    over what is broadcast by atomic additions in fp32, in no fixed order. Empty rows give none to query, key and
    numbers that are added.

    Source: flex_attention (Dong et al., 2024), with block lists that are read from the mask's elements.
    """
    query, key, value = in_autocast_dtype(query, key, value)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    queries = query.shape[2]
    if in_whole_blocks:
        query, key, value = map(_to_whole_blocks, (query, key, value))
    elements = _Elements(_of_all_places(as_four(mask), query, key))
    *blocks, empty = lists[:9]
    # Of numbers that are added rows have an offset in place of that they are empty.
    rows = _Elements(as_four(lists[9 if kind == "added" else 8][..., None]))
    offsets = None
    biases = None
    if bias is not None:
        biases = _Elements(_of_all_places(as_four(bias), query, key))
        offsets = _Elements(as_four(lists[9][..., None]))
    kept = _Elements(as_four(factors)) if factors is not None else None
    is_mean = empty_rows == "mean" and kind != "added"

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor, *tensors: Tensor) -> Tensor:
        if kind == "added":
            return query >= 0
        element = elements.at(tensors[0], batch, head, query, key)
        seen = element if kind == "shows" else ~element
        return seen | rows.at(tensors[1], batch, head, query, key) if is_mean else seen

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, *tensors: Tensor) -> Tensor:
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        if kind == "added":
            number, offset = (
                each.at(tensor, batch, head, query, key).to(score.dtype)
                for each, tensor in zip((elements, rows), tensors[:2], strict=True)
            )
            if kept is not None:
                factor = kept.at(tensors[2], batch, head, query, key)
                if factor.dtype == torch.bool:
                    score = torch.where(factor, score, 0.0)
                else:
                    is_replaced, factor = factor.isnan(), factor.to(score.dtype)
                    # The zero inside is for backward, in which a gradient of zero is multiplied by it.
                    score = torch.where(is_replaced, 0.0, score * torch.where(is_replaced, 0.0, factor))
            # In this order, so that a number that swallows the score does so here too. Without the offset backward
            # would take a difference of two such numbers for the logarithm of a weight.
            return (score + number) - offset
        if biases is not None and offsets is not None:
            number, offset = (
                each.at(tensor, batch, head, query, key).to(score.dtype)
                for each, tensor in zip((biases, offsets), tensors[-2:], strict=True)
            )
            score = (score + number) - offset
        return torch.where(rows.at(tensors[0], batch, head, query, key), 0.0, score) if is_mean else score

    of_mask: tuple[Tensor, ...] = ()
    of_score: tuple[Tensor, ...] = ()
    if kind == "added":
        of_score = (elements.tensor, rows.tensor, *(() if kept is None else (kept.tensor,)))
    elif is_mean:
        of_mask, of_score = (elements.tensor, rows.tensor), (rows.tensor,)
    else:
        of_mask = (elements.tensor,)
    if biases is not None and offsets is not None:
        of_score = (*of_score, biases.tensor, offsets.tensor)
    score = changed if of_score or softcap is not None else None
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = as_flex_takes(query, key, value)
        if _is_dense(query, sinks, of_score):
            out, logsumexp = dense_attention(q, k, v, is_seen, of_mask, scale, score or _unchanged, of_score)
        else:
            options = flex_tiles.of_call(
                q, sum(each.element_size() for each in (mask, bias, factors) if each is not None)
            )
            out, logsumexp = attention.flex_attention(
                q, k, v, tuple(blocks), BLOCK, is_seen, of_mask, scale, score, of_score, options
            )
        if in_whole_blocks:
            out, logsumexp = (each.narrow(2, 0, queries) for each in (out, logsumexp))
        if sinks is not None:
            has_offset = kind == "added" or biases is not None
            offset_rows = lists[9].narrow(2, 0, queries) if biases is None and has_offset else lists[-1]
            of_queries = sinks_of_queries(sinks).to(logsumexp.dtype)
            if has_offset and empty_rows == "zeros":  # a column of the softmax, which may be as low as the offset
                of_queries = of_queries - offset_rows.to(logsumexp.dtype)
            elif has_offset:  # taken off a logsumexp that is rounded
                logsumexp = logsumexp + offset_rows.to(logsumexp.dtype)
            out = beside_sinks(out, logsumexp, of_queries)
        if empty_rows == "nan":
            out = out.masked_fill(empty.narrow(2, 0, queries)[..., None], float("nan"))
        return out.to(query.dtype)


def _to_whole_blocks(operand: Tensor) -> Tensor:
    """With zeros behind its rows, as many as the mask has."""
    length = operand.shape[2]
    return torch.nn.functional.pad(operand, (0, 0, 0, to_whole_blocks(length) - length))


def _is_dense(query: Tensor, sinks: Tensor | None, of_score: tuple[Tensor, ...]) -> bool:
    """Off a GPU flex_attention has no gradients of numbers, and in fp64 those of its logsumexp are of fp32."""
    return not query.is_cuda and (_has_gradient(*of_score) or (sinks is not None and _has_gradient(query, sinks)))


def _unchanged(score: Tensor, *given: Tensor) -> Tensor:
    return score


def _has_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _of_all_places(four: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What has a gradient, as a number for each query and key: all that add to one number's at once wait in turn.

    No memory is taken for them but that of the gradient, which eager makes too.
    """
    if not _has_gradient(four):
        return four
    return four.expand(*four.shape[:2], query.shape[2], key.shape[2])


class _Elements:
    """A tensor of four dimensions as kernels read it: without those of size 1, over which it is broadcast.

    The last one stays if there is no other: flex_attention's graphs must read by an index.
    """

    def __init__(self, four: Tensor) -> None:
        self.is_read = [not (isinstance(size, int) and size == 1) for size in four.shape]
        self.is_single = not any(self.is_read)
        self.is_read[-1] |= self.is_single
        self.tensor = four.squeeze([dim for dim, is_read in enumerate(self.is_read) if not is_read])

    def at(self, tensor: Tensor, *places: Tensor) -> Tensor:
        index = [place for place, is_read in zip(places, self.is_read, strict=True) if is_read]
        return tensor[index[0] * 0] if self.is_single else tensor[tuple(index)]
