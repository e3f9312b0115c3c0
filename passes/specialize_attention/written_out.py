"""Reads attention that is written out: softmax between two products."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.index_expressions import IndexReader, Unreadable
from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.values import value_of
from glue_compiler.ops.mask_blocks import EmptyRows, Kind, hidden_below
from glue_compiler.passes.specialize_attention.attention_parts import Mask, NotAttention
from glue_compiler.passes.specialize_attention.operands import before_widening, operand_behind, regrouped_from
from glue_compiler.passes.specialize_attention.products import product_of

aten = torch.ops.aten
_PASSED = (aten.clone, aten.contiguous, aten.view, aten.reshape, aten.flatten, aten.unflatten)


@dataclass
class Chain:
    """Softmax between two products, read from its end: what was found so far.

    Attributes:
        links: the values between the products.
        factor: of the scores when they are masked. scale: that and those of the scores before.
        dtypes: that the masked scores are converted to before they are exponentiated, from the last one on.
        has_floor: the masked scores are no less than a number that hides a key.
        has_sinks: the weights are all columns of the softmax but the last; ``sinks`` are its scores, ``[B, H, Q, 1]``.
    """

    links: list[Value] = field(default_factory=list)
    mask: Mask | None = None
    dropout: Any = 0.0
    scale: Any = 1.0
    factor: float = 1.0
    softcap: float | None = None
    has_floor: bool = False
    has_sinks: bool = False
    sinks: Value | None = None
    bias: Value | None = None
    dtypes: list[torch.dtype] = field(default_factory=list)


@dataclass(frozen=True)
class WrittenOut:
    """What :class:`AttentionSite` says of an attention, as values; ``inside`` are its nodes."""

    query: Value
    key: Value
    value: Value
    chain: Chain
    inside: tuple[fx.Node, ...]
    is_key_transposed: bool = False


def read_written_out(output: Value, call: Call, reader: IndexReader) -> WrittenOut | None:
    """matmul(dropout(softmax(f * (cap(g * matmul(query, key^T)) + bias + mask))), value); None if the product is none.

    Rows and heads may be one dimension, ``[B * H, T, D]``, of any of the operands, and of the scores in any place.

    Raises:
        NotAttention: it is one in another form.
    """
    operators = reader.operators
    chain = Chain()
    outer = product_of(call, operators)
    if outer is None or outer.is_transposed:
        return None
    weights = _softmax(outer.left, chain, operators)
    if weights is None:
        return None
    weights = _without_row_maximum(_regrouped(weights, chain, operators), chain, operators)
    if chain.has_sinks:
        weights = _without_sinks(weights, chain, operators)
    weights = _without_floor(weights, chain, reader)
    scores = _capped(_biased(_masked(weights, chain, reader), chain, operators), chain, operators)
    product = product_of(operators.does(scores), operators)
    if product is None or (chain.has_floor and chain.mask is None):
        raise NotAttention("softmax of scores that are changed in another way than by a scale, a soft cap and a mask")
    chain.links.append(scores)
    query = operand_behind(product.left, output.node, reader, is_transposed=False)
    key = operand_behind(product.right, output.node, reader, is_transposed=not product.is_transposed)
    value = operand_behind(outer.right, output.node, reader, is_transposed=False)
    is_key_transposed = key is None and not product.is_transposed and operators.meta(product.right).rank == 4
    key = product.right if is_key_transposed else key
    if query is None or key is None or value is None:
        return None
    query, key = (before_widening(each, output, operators) for each in (query, key))
    _require_one_grouping(query, chain, operators)
    nodes = [operators.node_of(link) for link in chain.links]
    nodes += [link.node for link in chain.links if isinstance(value_of(link.node), tuple)]
    if any(node is None or node.graph is not output.node.graph for node in nodes):
        return None
    inside = _used_here_alone([node for node in nodes if node is not None], scores, output.node, operators)
    _require_one_autocast(inside, output.node, operators)
    _require_one_precision((query, key, value), chain.links, output, operators)
    return WrittenOut(query, key, value, chain, inside, is_key_transposed)


def has_softmax(call: Call, operators: Operators) -> bool:
    """Is softmax over the last of three or four dimensions behind the first factor of a product, whatever its form?"""
    tensors = call.arguments.get("tensors") or (call.arguments.get("self"),)
    weights: Any = tensors[0]
    while operators.is_tensor(weights):
        match operators.does(weights):
            case Call(aten.softmax | aten.special_softmax, {"dim": int() as dim}):
                rank = operators.meta(weights).rank
                return rank in (3, 4) and dim % rank == rank - 1
            case Call(aten.dropout, {"input": behind}):
                weights = behind
            case Call(operator, {"self": behind}) if operator in _PASSED or operator in CONVERSIONS:
                weights = behind
            case _:
                return False
    return False


def _softmax(weights: Any, chain: Chain, operators: Operators) -> Value | None:
    """What the softmax over keys behind ``weights`` is taken of; None if there is none."""
    while operators.is_tensor(weights):
        call = operators.does(weights)
        if call is None:
            return None
        chain.links.append(weights)
        match call:
            case Call(aten.softmax | aten.special_softmax, {"self": scores, "dim": dim}):
                rank = operators.meta(weights).rank
                is_over_keys = rank in (3, 4) and isinstance(dim, int) and dim % rank == rank - 1
                chain.dtypes.append(operators.meta(weights).dtype)
                return scores if is_over_keys and operators.is_tensor(scores) else None
            case Call(aten.dropout, {"input": kept, "p": p, "train": train}):
                if train and p != 0:
                    if chain.dropout:
                        raise NotAttention("it has two dropouts")
                    chain.dropout = p
                weights = kept
            case Call(aten.slice | aten.narrow, {"self": Value() as part}) if not chain.has_sinks:
                if not _is_all_but_the_last(call, part, weights, operators):
                    return None
                chain.has_sinks = True
                weights = part
            case _ if call.operator in CONVERSIONS:
                weights = call.arguments["self"]
            case _:
                weights = regrouped_from(weights, operators)
    return None


def _regrouped(value: Value, chain: Chain, operators: Operators) -> Value:
    """Takes views off the scores that make one dimension of rows and heads, or two of one; and copies."""
    while (before := regrouped_from(value, operators)) is not None:
        chain.links.append(value)
        value = before
    return value


def _require_one_grouping(query: Value, chain: Chain, operators: Operators) -> None:
    """Rows and heads that are one dimension in one place are told apart as the query's, of which masks are read."""
    masks = [each.value for each in chain.mask.parts] if chain.mask is not None else []
    masks += [chain.bias] if chain.bias is not None else []
    shapes = {link: operators.meta(link).shape for link in chain.links}
    merged = [operators.does(link) for link, shape in shapes.items() if len(shape) == 3]
    given = [each for each in masks if any(call and each in call.arguments.values() for call in merged)]
    if any(len(shape) == 3 and shape[0] != 1 for shape in (operators.meta(each).shape for each in given)):
        raise NotAttention("its mask has one dimension for rows and heads together")
    wanted = operators.meta(query).shape[:2]
    if merged and any(len(shape) == 4 and shape[:2] != wanted for shape in shapes.values()):
        raise NotAttention("rows and heads of its scores are not those of its query")


def _is_all_but_the_last(call: Call, whole: Value, part: Value, operators: Operators) -> bool:
    before, after = operators.meta(whole).shape, operators.meta(part).shape
    starts, steps = call.arguments["start"] in (None, 0), call.arguments.get("step", 1) == 1
    return starts and steps and (*before[:-1], before[-1] - 1) == tuple(after)


def _without_row_maximum(value: Value, chain: Chain, operators: Operators) -> Value:
    """Takes the subtraction of a row's maximum off the scores, which softmax does not see."""
    match operators.does(value):
        case Call(aten.sub | aten.subtract, {"self": Value() as scores, "other": Value() as most, "alpha": 1}):
            if _is_row_maximum(most, scores, operators):
                chain.links += [value, most]
                return scores
        case _:
            pass
    return value


def _without_sinks(value: Value, chain: Chain, operators: Operators) -> Value:
    """Takes the column of sinks off the scores."""
    match operators.does(value):
        case Call(aten.cat | aten.concat, {"tensors": (Value() as scores, Value() as sinks), "dim": int() as dim}):
            column = operators.meta(sinks).shape[-1] if operators.is_tensor(sinks) else None
            if operators.is_tensor(scores) and operators.meta(scores).rank == 4 and dim % 4 == 3 and column == 1:
                chain.links.append(value)
                chain.sinks = sinks
                return scores
        case _:
            pass
    raise NotAttention("only a part of the softmax is used, and the rest of it are no attention sinks")


def _without_floor(value: Value, chain: Chain, reader: IndexReader) -> Value:
    """Takes a lower bound off the masked scores that hides a key as the mask does: weights of zero have no gradient."""
    bounds: tuple[tuple[Any, Any], ...] = ()
    match reader.operators.does(value):
        case Call(aten.max | aten.maximum, {"self": first, "other": second}):
            bounds = ((first, second), (second, first))
        case Call(aten.clamp, {"self": scores, "min": low, "max": None}):
            bounds = ((scores, low),)
        case Call(aten.clamp_min, {"self": scores, "min": low}):
            bounds = ((scores, low),)
        case _:
            pass
    for scores, low in bounds:
        if reader.operators.is_tensor(scores) and _filling(low, "hides", 1.0, value, reader) is not None:
            chain.has_floor = True
            chain.links.append(value)
            return _regrouped(scores, chain, reader.operators)
    return value


def _is_row_maximum(value: Value, scores: Value, operators: Operators) -> bool:
    match operators.does(value):
        case Call(aten.max | aten.amax, {"self": of, "dim": int() | (int(),) as dim, "keepdim": True}):
            dim, rank = dim[0] if isinstance(dim, tuple) else dim, operators.meta(scores).rank
            return of == scores and not value.leaf and dim % rank == rank - 1
    return False


def _masked(value: Value, chain: Chain, reader: IndexReader) -> Value:
    """Takes masks off the scores, and what they are multiplied by together."""
    operators = reader.operators
    behind = dataclasses.replace(chain, links=[], dtypes=[*chain.dtypes], scale=1.0)
    scores = _scaled(value, behind, operators)
    behind.factor = behind.scale
    behind.dtypes += [reader.dtype(link) for link in behind.links]
    match operators.does(scores):
        case Call(aten.add | aten.add_ as add, {"self": Value() as first, "other": Value() as second, "alpha": 1}):
            # In place the scores alone are written: they are in no other memory, as a mask may be.
            for inner, mask in ((first, second), (second, first))[: 2 if add is aten.add else 1]:
                unfilled = _without_fillings(inner, dataclasses.replace(behind, links=[]), reader)
                if operators.is_tensor(mask) and _are_scores(unfilled, operators):
                    dtype = reader.dtype(scores)
                    is_rounded = any(torch.promote_types(each, dtype) != each for each in behind.dtypes)
                    empty_rows: EmptyRows = "zeros" if chain.has_sinks else "nan"
                    behind.mask = Mask(mask, "added", None if is_rounded else empty_rows, behind.factor)
                    behind.links.append(scores)
                    scores = inner
                    break
        case _:
            pass
    scores = _without_fillings(scores, behind, reader)
    if behind.mask is None:
        return value
    if chain.has_floor:
        behind.mask = dataclasses.replace(behind.mask, empty_rows=None)
    chain.links += behind.links
    chain.mask, chain.scale, chain.factor, chain.dtypes = behind.mask, behind.scale, behind.factor, behind.dtypes
    return scores


def _without_fillings(value: Value, chain: Chain, reader: IndexReader) -> Value:
    """Takes boolean masks off the scores: ``masked_fill`` or ``where``."""
    while True:
        role: Kind
        value = _regrouped(value, chain, reader.operators)
        match reader.operators.does(value):
            case Call(
                aten.masked_fill | aten.masked_fill_,
                {"self": Value() as scores, "mask": Value() as mask, "value": filling},
            ):
                role = "hides"
            case Call(aten.where, {"condition": Value() as mask, "self": Value() as scores, "other": filling}):
                role = "shows"
            case _:
                return value
        if not _is_filled(value, mask, role, filling, chain, reader):
            return value
        value = scores


def _is_filled(value: Value, mask: Value, role: Kind, filling: Any, chain: Chain, reader: IndexReader) -> bool:
    """Does ``filling`` leave a weight of zero where ``mask`` puts it in ``value``? Then it is a mask of the chain."""
    low = _filling(filling, role, chain.factor, value, reader)
    if reader.dtype(mask) != torch.bool or low is None:
        return False
    chain.mask = Mask(mask, role, _without_keys(low, chain), also=chain.mask)
    chain.links.append(value)
    return True


def _biased(value: Value, chain: Chain, operators: Operators) -> Value:
    """Takes numbers off the scores, to which a mask is added, or in which it is filled."""
    if chain.mask is None or chain.factor != 1 or len({mask.role == "added" for mask in chain.mask.parts}) > 1:
        return value
    value = _regrouped(value, chain, operators)
    match operators.does(value):
        case Call(aten.add | aten.add_ as add, {"self": Value() as first, "other": Value() as second, "alpha": 1}):
            for scores, bias in ((first, second), (second, first))[: 2 if add is aten.add else 1]:
                if operators.is_tensor(bias) and _is_product(scores, operators):
                    chain.bias = bias
                    chain.links.append(value)
                    return scores
        case Call(operator, {"self": Value() as scores}) if operator in CONVERSIONS:
            chain.links.append(value)
            return _biased(scores, chain, operators)
    return value


def _filling(filling: Any, role: Kind, factor: float, value: Value, reader: IndexReader) -> float | None:
    """The score that leaves a weight of zero, ``factor`` times ``filling`` in ``value``; None if it does not."""
    dtype, of_filling = reader.dtype(value), None
    if isinstance(filling, Value) and reader.operators.is_tensor(filling) and not reader.shape(filling):
        of_filling = reader.dtype(filling)
        try:
            filling = reader.read(filling, ())
        except Unreadable:
            return None
        filling = float(filling) if filling.is_number and filling is not sympy.nan else None
    if not isinstance(filling, int | float) or not dtype.is_floating_point:
        return None
    if not _is_held(filling if of_filling is None else torch.tensor(filling, dtype=of_filling), role, dtype):
        return None
    filling *= factor
    return _rounded(filling, dtype) if filling <= hidden_below(dtype) else None


def _is_held(filling: float | torch.Tensor, role: Kind, dtype: torch.dtype) -> bool:
    """Does torch fill scores of ``dtype`` with ``filling``? Some numbers that it does not reach to are refused."""
    scores, mask = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=torch.bool)
    try:
        scores.masked_fill(mask, filling) if role == "hides" else torch.where(mask, scores, filling)
    except RuntimeError:
        return False
    return True


def _without_keys(filling: float, chain: Chain) -> EmptyRows:
    """What softmax makes of a row in which all scores are ``filling``."""
    if chain.has_sinks:
        return "zeros"  # nothing has a weight but the sink
    for dtype in reversed(chain.dtypes):
        filling = _rounded(filling, dtype)
    return "mean" if math.isfinite(filling) else "nan"


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=torch.float64).to(dtype).item()


def _capped(value: Value, chain: Chain, operators: Operators) -> Value:
    """Takes factors off the scores, and ``tanh`` with the factors before it."""
    value = _scaled(value, chain, operators)
    match operators.does(value):
        case Call(aten.tanh, {"self": Value() as scores}) if operators.is_tensor(scores):
            chain.softcap = chain.scale  # factor * tanh(before * scores), and the scale is the product of both
            chain.links.append(value)
            return _scaled(scores, chain, operators)
    return value


def _scaled(value: Value, chain: Chain, operators: Operators) -> Value:
    """Takes factors off the scores."""
    while True:
        value = _regrouped(value, chain, operators)
        call = operators.does(value)
        match call:
            case Call(aten.mul | aten.multiply | aten.mul_, {"self": first, "other": second}):
                scores, factor = (first, second) if isinstance(first, Value) else (second, first)
            case Call(aten.div | aten.divide | aten.true_divide | aten.div_, {"self": scores, "other": divisor}):
                is_rounded = call.arguments.get("rounding_mode") is not None
                is_number = isinstance(divisor, int | float) and divisor != 0
                factor = 1 / divisor if is_number and not is_rounded else None
            case Call(operator, {"self": scores}) if operator in CONVERSIONS:
                factor = 1
            case _:
                return value
        if not operators.is_tensor(scores) or not isinstance(factor, int | float):
            return value
        if not math.isfinite(factor) or factor <= 0:
            return value
        chain.scale *= factor
        chain.links.append(value)
        value = scores


def _are_scores(value: Value, operators: Operators) -> bool:
    """Are they a product, or a product to which something is added?"""
    if _is_product(value, operators):
        return True
    match operators.does(_regrouped(value, Chain(), operators)):
        case Call(aten.add | aten.add_, {"self": Value() as first, "other": Value() as second, "alpha": 1}):
            return _is_product(first, operators) or _is_product(second, operators)
    return False


def _is_product(value: Value, operators: Operators) -> bool:
    return product_of(operators.does(_capped(value, Chain(), operators)), operators) is not None


def _used_here_alone(links: list[fx.Node], scores: Value, output: fx.Node, operators: Operators) -> tuple[fx.Node, ...]:
    """The nodes of a chain from ``scores`` on, with those that stand for the same values, last first.

    Raises:
        NotAttention: something else uses them.
    """
    inside = dict.fromkeys(links)
    values = {operators.value(node) for node in links}
    waiting = list(inside)
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user is output or user in inside or _reads_sizes_alone(user, node, scores, operators):
                continue
            if not user.op.startswith("call_") or operators.value(user) not in values:
                raise NotAttention("the attention weights or scores are used elsewhere too")
            inside[user] = None
            waiting.append(user)
    return tuple(node for node in reversed(output.graph.nodes) if node in inside)


def _reads_sizes_alone(user: fx.Node, node: fx.Node, scores: Value, operators: Operators) -> bool:
    """Does ``user`` expand another tensor to the sizes of ``node``, which are all that it takes of it?

    They are those of the scores ``[B, H, Q, K]``, and not of a row's maximum, or of scores with sinks.
    """
    if not user.op.startswith("call_") or len(user.all_input_nodes) != 2:
        return False
    shape = operators.meta(operators.value(node)).shape
    if len(shape) != 4 or shape[-2:] != operators.meta(scores).shape[-2:]:
        return False
    match operators.does(operators.value(user)):
        case Call(aten.expand_as, {"other": Value() as other}):
            return operators.node_of(other) is node
    return False


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
