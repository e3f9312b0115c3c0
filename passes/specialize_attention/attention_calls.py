"""Finds attention in a captured graph: ``scaled_dot_product_attention``, and softmax between two products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import fx

from glue_compiler.fx.index_expressions import IndexReader, Unreadable
from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.index_views import Element, NotAView, broadcast_index, source_of
from glue_compiler.fx.operators import FOUND, Call, Operators, Value
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import requires_grad, value_of
from glue_compiler.passes.specialize_attention.gradients import Gradients

aten = torch.ops.aten


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: ``value`` is True for those it ``shows`` or ``hides``, or is ``added`` to the scores."""

    value: Value
    role: Literal["shows", "hides", "added"]


@dataclass(frozen=True)
class AttentionSite:
    """One attention. ``query`` is ``[B, Hq, T, D]``, ``key`` and ``value`` ``[B, Hkv, T, D]``.

    Attributes:
        output: the node with the result ``[B, Hq, T, D]``. It finds in the memory of query, key and value what was
            there when they were made.
        grouped_key, grouped_value: key and value before their heads were repeated for the query's; the same where they
            were not.
        is_grouped: the query has more heads than ``grouped_key``, or may have.
        scale: None is ``1 / sqrt(D)``.
        inside: the nodes between query, key, value and output of softmax written out between two products. Nothing
            else uses them. Empty for ``scaled_dot_product_attention``.
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


@dataclass
class _Chain:
    """Softmax between two products, read from its end: what was found so far."""

    links: list[Value]
    mask: Mask | None = None
    dropout: float = 0.0
    scale: float = 1.0


def attention_sites(scope: Scope, reader: IndexReader) -> Iterator[AttentionSite | tuple[fx.Node, str]]:
    """The attentions in one graph that have a mask, and (node, reason) for those that are left alone at first sight."""
    operators = reader.operators
    for node in scope.module.graph.nodes:
        found = value_of(node)
        if not node.op.startswith("call_") or not isinstance(found, torch.Tensor):
            continue
        if found.dim() != 4 or not found.is_floating_point():
            continue
        value = operators.value(node)
        call = operators.does(value) if value.node is node else None
        try:
            if call is None:
                continue
            if call.operator is aten.scaled_dot_product_attention:
                site = _operator_site(node, call, scope, reader)
            elif call.operator is aten.matmul:
                site = _written_out_site(value, call, scope, reader)
            else:
                continue
        except NotAttention as reason:
            yield node, str(reason)
        else:
            if site is not None:
                yield site


def _operator_site(node: fx.Node, call: Call, scope: Scope, reader: IndexReader) -> AttentionSite | None:
    given = call.arguments
    mask = given["attn_mask"]
    if mask is None:
        return None
    if not isinstance(mask, Value) or given["is_causal"]:
        raise NotAttention("a mask that is no tensor, or one beside is_causal")
    role: Literal["shows", "added"] = "shows" if reader.dtype(mask) == torch.bool else "added"
    settings = (given["dropout_p"], given["scale"], given["enable_gqa"])
    operands = (given["query"], given["key"], given["value"])
    return _site(scope, reader, node, operands, Mask(mask, role), *settings)


def _site(
    scope: Scope,
    reader: IndexReader,
    output: fx.Node,
    operands: tuple[Any, Any, Any],
    mask: Mask | None,
    dropout: Any,
    scale: Any,
    is_grouped: bool,
    inside: tuple[fx.Node, ...] = (),
) -> AttentionSite:
    operators = reader.operators
    query, key, value = (_node_at(each, output, operators) for each in operands)
    _require_supported_numbers(dropout, scale)
    shapes = [reader.shape(operators.value(node)) for node in (query, key, value, output)]
    (batch, heads, length, size), of_key, of_value, of_output = shapes
    if not value_of(query).is_floating_point():
        raise NotAttention(f"query, key and value are of {value_of(query).dtype}")
    if any(each == 0 for shape in shapes for each in shape):
        raise NotAttention("there is nothing to attend to")
    if of_key[:3] != of_value[:3] or of_key[0] != batch or of_output[:3] != (batch, heads, length):
        raise NotAttention("query, key, value or mask are broadcast to each other")
    if of_key[3] != size or of_output[3] != of_value[3]:
        raise NotAttention("query, key and value have no sizes that are known to fit")
    if of_key[1] != heads and not is_grouped:
        raise NotAttention("one head of keys is broadcast to all queries")
    if length != of_key[2]:
        raise NotAttention("there are not provably as many keys as queries (a cache of earlier keys?)")
    gradients = Gradients(output, operators)
    if not all(map(gradients.pass_through, inside)):
        raise NotAttention("gradients are switched off for a part of it")
    if mask is not None and mask.value.step != FOUND and requires_grad(value_of(mask.value.node)):
        raise NotAttention("the mask has a gradient")
    grouped_key, grouped_value = (_before_repeat(node, heads, gradients, reader) for node in (key, value))
    if len({reader.shape(operators.value(node))[1] for node in (grouped_key, grouped_value)}) > 1:
        grouped_key, grouped_value = key, value
    if not gradients.may_save(query, grouped_key, grouped_value, output):
        raise NotAttention("its operands or its result are written in place later, and backward would read them")
    return AttentionSite(
        scope,
        output,
        query,
        key,
        value,
        grouped_key,
        grouped_value,
        is_grouped or grouped_key is not key,
        mask,
        float(dropout),
        float(scale) if scale is not None else None,
        inside,
    )


def _node_at(value: Any, output: fx.Node, operators: Operators) -> fx.Node:
    """The node of a query, key or value; the attention finds in its memory what it has made."""
    if not operators.is_tensor(value) or operators.meta(value).rank != 4:
        raise NotAttention("query, key and value are not plain tensors of four dimensions")
    node = operators.node_of(value)
    if node is None or not operators.is_kept(value, output):
        raise NotAttention("the memory of query, key or value is written in place")
    if node.graph is not output.graph:
        raise NotAttention("query, key or value belong to another graph")
    return node


def _require_supported_numbers(dropout: Any, scale: Any) -> None:
    if not isinstance(dropout, int | float) or not (scale is None or isinstance(scale, int | float)):
        raise NotAttention("dropout or scale is no constant")
    if not 0 <= dropout < 1:
        raise NotAttention(f"its dropout is {dropout}")
    # Kernels take the maximum of unscaled scores, and hide keys before they scale.
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise NotAttention(f"its scale is {scale}; kernels without a mask take positive ones")


def _before_repeat(node: fx.Node, heads: Any, gradients: Gradients, reader: IndexReader) -> fx.Node:
    """The tensor of which ``node`` repeats each head for a group of query heads; ``node`` itself if it does not."""
    operators = reader.operators
    wanted = tuple(sympy.Symbol(name, integer=True, nonnegative=True) for name in "bhtd")
    value = operators.value(node)
    shape = reader.shape(value)
    element = Element(value, broadcast_index(wanted, shape))
    while gradients.pass_through(element.value.node):
        try:
            element = source_of(operators, element.value, element.index)
        except NotAView:
            break
        source = reader.shape(element.value)
        if len(source) != 4 or not isinstance(heads, int) or not isinstance(source[1], int) or source[1] < 1:
            continue
        if source[1] >= heads or heads % source[1] or (source[0], *source[2:]) != (shape[0], *shape[2:]):
            continue
        one_group = (wanted[0], sympy.floor(wanted[1] / (heads // source[1])), *wanted[2:])
        if element.index == broadcast_index(one_group, source):
            found = operators.node_of(element.value)
            if found is not None and found.graph is node.graph and operators.is_kept(element.value, gradients.output):
                return found
    return node


def _written_out_site(output: Value, call: Call, scope: Scope, reader: IndexReader) -> AttentionSite | None:
    """matmul(dropout(softmax(scale * matmul(query, key^T) + mask)), value)."""
    operators = reader.operators
    chain = _Chain([])
    weights = _softmax(call.arguments["self"], chain, operators)
    if weights is None:
        return None
    scores = _scaled(_masked(weights, chain, reader), chain, operators)
    product = operators.does(scores)
    if product is None or product.operator is not aten.matmul:
        raise NotAttention("softmax of scores that are changed in another way than by a scale and a mask")
    chain.links.append(scores)
    key = _transposed(product.arguments["other"], output.node, reader)
    query, value = product.arguments["self"], call.arguments["other"]
    if key is None or not operators.is_tensor(query) or not operators.is_tensor(value):
        return None
    nodes = [operators.node_of(link) for link in chain.links]
    if any(node is None or node.graph is not output.node.graph for node in nodes):
        return None
    inside = _used_here_alone([node for node in nodes if node is not None], output.node, operators)
    _require_one_autocast(inside, output.node, operators)
    _require_one_precision((query, key, value), chain.links, output, operators)
    operands = (query, key, value)
    return _site(scope, reader, output.node, operands, chain.mask, chain.dropout, chain.scale, False, inside)


def _softmax(weights: Any, chain: _Chain, operators: Operators) -> Value | None:
    """What the softmax over keys behind ``weights`` is taken of; None if there is none."""
    while operators.is_tensor(weights):
        call = operators.does(weights)
        if call is None:
            return None
        chain.links.append(weights)
        match call:
            case Call(aten.softmax | aten.special_softmax, {"self": scores, "dim": dim}):
                rank = operators.meta(weights).rank
                is_over_keys = rank == 4 and isinstance(dim, int) and dim % rank == rank - 1
                return scores if is_over_keys and operators.is_tensor(scores) else None
            case Call(aten.dropout, {"input": kept, "p": p, "train": train}):
                if train and p != 0:
                    if chain.dropout:
                        raise NotAttention("it has two dropouts")
                    chain.dropout = p
                weights = kept
            case Call(aten.clone | aten.contiguous, {"self": same}):
                weights = same
            case Call(aten.slice | aten.narrow, {"self": part}):
                behind = operators.does(part)
                if behind is not None and behind.operator is aten.softmax:
                    raise NotAttention("only a part of the softmax is used: attention sinks")
                return None
            case _:
                if call.operator not in CONVERSIONS:
                    return None
                weights = call.arguments["self"]
    return None


def _masked(value: Value, chain: _Chain, reader: IndexReader) -> Value:
    """Takes a mask off the scores: ``+``, ``masked_fill`` or ``where``."""
    operators = reader.operators
    call = operators.does(value)
    match call:
        case Call(aten.add, {"self": Value() as first, "other": Value() as second, "alpha": 1}):
            for scores, mask in ((first, second), (second, first)):
                if operators.is_tensor(mask) and _is_product(scores, operators):
                    chain.mask = Mask(mask, "added")
                    chain.links.append(value)
                    return scores
        case Call(aten.masked_fill, {"self": Value() as scores, "mask": Value() as mask, "value": filling}):
            if reader.dtype(mask) == torch.bool and _hides_by(filling, value, reader):
                chain.mask = Mask(mask, "hides")
                chain.links.append(value)
                return scores
        case Call(aten.where, {"condition": Value() as mask, "self": Value() as scores, "other": filling}):
            if reader.dtype(mask) == torch.bool and _hides_by(filling, value, reader):
                chain.mask = Mask(mask, "shows")
                chain.links.append(value)
                return scores
        case Call(operator, {"self": Value() as scores}) if operator in CONVERSIONS:
            chain.links.append(value)
            return _masked(scores, chain, reader)
        case _:
            pass
    return value


def _hides_by(filling: Any, value: Value, reader: IndexReader) -> bool:
    """Does a score of ``filling`` in ``value`` leave a weight of zero?"""
    dtype = reader.dtype(value)
    if isinstance(filling, Value) and reader.operators.is_tensor(filling) and not reader.shape(filling):
        try:
            filling = reader.read(filling, ())
        except Unreadable:
            return False
        filling = float(filling) if filling.is_number and filling is not sympy.nan else None
    is_known = isinstance(filling, int | float) and dtype.is_floating_point
    return is_known and filling <= max(torch.finfo(dtype).min, -1e9)


def _scaled(value: Value, chain: _Chain, operators: Operators) -> Value:
    """Takes factors off the scores."""
    while True:
        call = operators.does(value)
        match call:
            case Call(aten.mul | aten.multiply, {"self": first, "other": second}):
                scores, factor = (first, second) if isinstance(first, Value) else (second, first)
            case Call(aten.div | aten.divide | aten.true_divide, {"self": scores, "other": divisor}):
                is_rounded = call.arguments.get("rounding_mode") is not None
                is_number = isinstance(divisor, int | float) and divisor != 0
                factor = 1 / divisor if is_number and not is_rounded else None
            case _:
                return value
        if not operators.is_tensor(scores) or not isinstance(factor, int | float):
            return value
        if not math.isfinite(factor) or factor <= 0:
            return value
        chain.scale *= factor
        chain.links.append(value)
        value = scores


def _is_product(value: Value, operators: Operators) -> bool:
    call = operators.does(_scaled(value, _Chain([]), operators))
    return call is not None and call.operator is aten.matmul


def _transposed(value: Any, output: fx.Node, reader: IndexReader) -> Value | None:
    """The key ``[B, H, S, D]`` behind ``[B, H, D, S]``; None if there is none."""
    operators = reader.operators
    if not operators.is_tensor(value) or operators.meta(value).rank != 4:
        return None
    b, h, d, s = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "bhds")
    shape = reader.shape(value)
    element = Element(value, broadcast_index((b, h, d, s), shape))
    gradients = Gradients(output, operators)
    while gradients.pass_through(element.value.node):
        try:
            element = source_of(operators, element.value, element.index)
        except NotAView:
            return None
        found = reader.shape(element.value)
        swapped = (shape[0], shape[1], shape[3], shape[2])
        if found == swapped and element.index == broadcast_index((b, h, s, d), found):
            node = operators.node_of(element.value)
            if node is not None and node.graph is output.graph:
                return element.value
    raise NotAttention("gradients are switched off for a part of it")


def _used_here_alone(links: list[fx.Node], output: fx.Node, operators: Operators) -> tuple[fx.Node, ...]:
    """The nodes of a chain, with those that stand for the same values, last first.

    Raises:
        NotAttention: something else uses them.
    """
    inside = dict.fromkeys(links)
    waiting = list(inside)
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user is output or user in inside:
                continue
            if not user.op.startswith("call_") or operators.value(user) != operators.value(node):
                raise NotAttention("the attention weights or scores are used elsewhere too")
            inside[user] = None
            waiting.append(user)
    return tuple(node for node in reversed(output.graph.nodes) if node in inside)


def _require_one_autocast(inside: tuple[fx.Node, ...], output: fx.Node, operators: Operators) -> None:
    modes = {operators.mode(node).autocast for node in (*inside, output)}
    if len(modes) > 1:
        raise NotAttention("autocast is switched on or off inside of it")


def _require_one_precision(
    operands: tuple[Value, Value, Value], links: list[Value], output: Value, operators: Operators
) -> None:
    """What is computed between the operands and the result is at least as exact as the result's dtype."""
    wanted = operators.meta(output)
    of_operands = {operators.meta(each).dtype for each in operands}
    is_cast = torch.is_autocast_enabled(wanted.device.type)
    is_cast = is_cast or bool(operators.mode(output.node).autocast)
    if of_operands != {wanted.dtype} and not (is_cast and torch.float64 not in of_operands):
        names = ", ".join(sorted(str(each) for each in of_operands | {wanted.dtype}))
        raise NotAttention(f"its parts are of several dtypes: {names}")
    for each in {operators.meta(link).dtype for link in links}:
        if torch.promote_types(each, wanted.dtype) != each:
            raise NotAttention(f"its parts are of several dtypes: {each} between {wanted.dtype}")
