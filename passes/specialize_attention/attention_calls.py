"""Finds attention in a captured graph: ``scaled_dot_product_attention``, and softmax between two products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import fx

from glue_compiler.fx.effects import Kind
from glue_compiler.fx.index_expressions import IndexReader
from glue_compiler.fx.index_views import (
    Element,
    NotAView,
    argument,
    broadcast_index,
    operator_name,
    shape_of,
    source_of,
)
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import is_plain, value_of


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: ``node`` is True for those it ``shows`` or ``hides``, or is ``added`` to the scores."""

    node: fx.Node
    role: Literal["shows", "hides", "added"]


@dataclass(frozen=True)
class AttentionSite:
    """One attention. ``query`` is ``[B, Hq, T, D]``, ``key`` and ``value`` ``[B, Hkv, S, D]``.

    Attributes:
        output: the node with the result ``[B, Hq, T, D]``.
        grouped_key, grouped_value: key and value before their heads were repeated for the query's; the same where they
            were not.
        is_grouped: the query has more heads than ``grouped_key``, or may have.
        scale: None is ``1 / sqrt(D)``.
        inside: the nodes between query, key, value and output, last first, of softmax written out between two products.
            Empty for ``scaled_dot_product_attention``.
    """

    scope: Scope
    output: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    grouped_key: fx.Node
    grouped_value: fx.Node
    is_grouped: bool
    mask: Mask | None
    dropout: float
    scale: float | None
    inside: tuple[fx.Node, ...] = ()


class NotAttention(Exception):
    """Attention, but in a form that cannot be specialised; the message says why."""


_CASTS = ("to", "float", "type_as", "half", "bfloat16", "double")


def attention_sites(scope: Scope, reader: IndexReader) -> Iterator[AttentionSite | tuple[fx.Node, str]]:
    """The attentions in one graph that have a mask, and (node, reason) for those that are left alone at first sight."""
    for node in scope.module.graph.nodes:
        try:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                site = _operator_site(node, scope, reader)
            elif operator_name(node) == "matmul" and isinstance(value_of(node), torch.Tensor):
                site = _written_out_site(node, scope, reader)
            else:
                continue
        except NotAttention as reason:
            yield node, str(reason)
        else:
            if site is not None:
                yield site


def _operator_site(node: fx.Node, scope: Scope, reader: IndexReader) -> AttentionSite | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    mask = given.get("attn_mask")
    if mask is None:
        return None
    if not isinstance(mask, fx.Node) or given.get("is_causal"):
        raise NotAttention("a mask that is no tensor, or one beside is_causal")
    role: Literal["shows", "added"] = "shows" if value_of(mask).dtype == torch.bool else "added"
    query, key, value = (given[name] for name in names[:3])
    settings: tuple[Any, ...] = (given.get("dropout_p", 0.0), given.get("scale"), given.get("enable_gqa", False))
    return _site(scope, reader, node, query, key, value, Mask(mask, role), *settings)


def _site(
    scope: Scope,
    reader: IndexReader,
    output: fx.Node,
    query: Any,
    key: Any,
    value: Any,
    mask: Mask | None,
    dropout: Any,
    scale: Any,
    is_grouped: bool,
    inside: tuple[fx.Node, ...] = (),
) -> AttentionSite:
    tensors = [value_of(node) for node in (query, key, value, output)]
    if not all(isinstance(t, torch.Tensor) and is_plain(t) and t.dim() == 4 for t in tensors):
        raise NotAttention("query, key and value are not plain tensors of four dimensions")
    if not isinstance(dropout, int | float) or not (scale is None or isinstance(scale, int | float)):
        raise NotAttention("dropout or scale is no constant")
    if not all(reader.is_fixed(node) for node in (query, key, value)):
        raise NotAttention("the memory of query, key or value is written in place")
    (batch, heads, length, _), of_key, of_value = shape_of(query), shape_of(key), shape_of(value)
    if of_key[:3] != of_value[:3] or of_key[0] != batch or shape_of(output)[:3] != (batch, heads, length):
        raise NotAttention("query, key, value or mask are broadcast to each other")
    if of_key[1] != heads and not is_grouped:
        raise NotAttention("one head of keys is broadcast to all queries")
    if length != of_key[2]:
        raise NotAttention("there are not provably as many keys as queries (a cache of earlier keys?)")
    grouped_key, grouped_value = (_before_repeat(node, heads, reader) for node in (key, value))
    if shape_of(grouped_key)[1] != shape_of(grouped_value)[1]:
        grouped_key, grouped_value = key, value
    is_grouped = is_grouped or grouped_key is not key
    scale = float(scale) if scale is not None else None
    return AttentionSite(
        scope,
        output,
        query,
        key,
        value,
        grouped_key,
        grouped_value,
        is_grouped,
        mask,
        float(dropout),
        scale,
        inside,
    )


def _before_repeat(node: fx.Node, heads: Any, reader: IndexReader) -> fx.Node:
    """The tensor of which ``node`` repeats each head for a group of query heads; ``node`` itself if it does not."""
    wanted = tuple(sympy.Symbol(name, integer=True, nonnegative=True) for name in "bhtd")
    element = Element(node, broadcast_index(wanted, shape_of(node)))
    while reader.is_pure(element.node) and element.node.graph is node.graph:
        try:
            element = source_of(element.node, element.index)
        except NotAView:
            return node
        shape = shape_of(element.node)
        if len(shape) != 4 or not isinstance(heads, int) or not isinstance(shape[1], int) or heads % shape[1]:
            continue
        one_group = (wanted[0], sympy.floor(wanted[1] / (heads // shape[1])), *wanted[2:])
        if shape[1] < heads and element.index == broadcast_index(one_group, shape):
            return element.node if reader.is_fixed(element.node) else node
    return node


def _written_out_site(node: fx.Node, scope: Scope, reader: IndexReader) -> AttentionSite | None:
    """matmul(dropout(softmax(scale * matmul(query, key^T) + mask)), value)."""
    weights, value = argument(node, 0, "input"), argument(node, 1, "other")
    chain: list[Any] = [weights]
    dropout = 0.0
    while isinstance(chain[-1], fx.Node) and operator_name(chain[-1]) in (*_CASTS, "dropout", "contiguous"):
        if operator_name(chain[-1]) == "dropout" and argument(chain[-1], 2, "training", True):
            dropout = argument(chain[-1], 1, "p", 0.5)
        chain.append(chain[-1].args[0])
    softmax = chain[-1]
    if not _is_tensor(softmax) or operator_name(softmax) != "softmax":
        if _is_tensor(softmax) and value_of(softmax).dim() == 4 and _is_part_of_softmax(softmax):
            raise NotAttention("the weights are a part of the softmax, as with attention sinks, which no kernel takes")
        return None
    if value_of(softmax).dim() != 4 or argument(softmax, 1, "dim") not in (-1, 3):
        return None
    mask, scores = _masked_scores(softmax.args[0], chain)
    scale, scores = _scaled_scores(scores, chain)
    if operator_name(scores) != "matmul":
        raise NotAttention("softmax of scores that are changed in another way than by a scale and a mask")
    chain.append(scores)
    query, transposed = scores.args
    key = _transposed(transposed)
    if key is None or not isinstance(query, fx.Node):
        return None
    if any(reader.numbering.effects[link].kind not in (Kind.PURE, Kind.OPAQUE) for link in chain):
        raise NotAttention("an operator in it is not torch's own")
    if any(len(link.users) > 1 for link in chain):
        raise NotAttention("the attention weights or scores are used elsewhere too")
    dtypes = {value_of(each).dtype for each in (query, key, value, scores, weights, node)}
    if len(dtypes) > 1:
        raise NotAttention(f"its parts are of several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    return _site(scope, reader, node, query, key, value, mask, dropout, scale, False, tuple(chain))


def _is_part_of_softmax(node: fx.Node) -> bool:
    return operator_name(node) == "getitem" and _is_tensor(node.args[0]) and operator_name(node.args[0]) == "softmax"  # type: ignore[arg-type]


def _masked_scores(node: Any, chain: list[Any]) -> tuple[Mask | None, Any]:
    """Takes a mask off the scores: ``+``, ``masked_fill`` or ``where``."""
    name = operator_name(node)
    if name in _CASTS and value_of(node).dtype == value_of(node.args[0]).dtype:
        chain.append(node)
        return _masked_scores(node.args[0], chain)
    if name == "add" and not node.kwargs:
        for scores, mask in (node.args, node.args[::-1]):
            if _is_tensor(scores) and _is_tensor(mask) and _is_product(scores):
                chain.append(node)
                return Mask(mask, "added"), scores
    if name == "masked_fill" and _hides_by(argument(node, 2, "value"), node):
        chain.append(node)
        return Mask(argument(node, 1, "mask"), "hides"), node.args[0]
    if name == "where" and len(node.args) == 3 and _hides_by(node.args[2], node):
        chain.append(node)
        return Mask(node.args[0], "shows"), node.args[1]
    return None, node


def _hides_by(filling: Any, node: fx.Node) -> bool:
    return isinstance(filling, int | float) and filling <= max(torch.finfo(value_of(node).dtype).min, -1e9)


def _scaled_scores(node: Any, chain: list[Any]) -> tuple[float, Any]:
    scale = 1.0
    while _is_tensor(node) and operator_name(node) in ("mul", "div", "truediv") and len(node.args) == 2:
        scores, factor = node.args
        if operator_name(node) == "mul" and _is_tensor(factor):
            scores, factor = factor, scores
        if node.kwargs or not isinstance(factor, int | float) or not math.isfinite(factor) or factor == 0:
            break
        scale = scale * factor if operator_name(node) == "mul" else scale / factor
        chain.append(node)
        node = scores
    return scale, node


def _is_product(node: fx.Node) -> bool:
    return operator_name(_scaled_scores(node, [])[1]) == "matmul"


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value_of(node), torch.Tensor)


def _transposed(node: Any) -> fx.Node | None:
    """The key ``[B, H, S, D]`` behind ``[B, H, D, S]``."""
    if not _is_tensor(node) or value_of(node).dim() != 4:
        return None
    b, h, d, s = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "bhds")
    try:
        element = source_of(node, (b, h, d, s))
    except NotAView:
        return None
    shape = shape_of(element.node)
    return element.node if len(shape) == 4 and element.index == broadcast_index((b, h, s, d), shape) else None
