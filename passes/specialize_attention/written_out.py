"""Reads attention that is written out: softmax between two products."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.gradients import Gradients
from glue_compiler.fx.index_expressions import IndexReader, Unreadable
from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.operators import UNTRACKED, Call, Operators, Value
from glue_compiler.fx.private_nodes import nodes_used_alone
from glue_compiler.fx.values import is_call, requires_grad, value_of
from glue_compiler.ops.mask_blocks import EmptyRows, Kind, hidden_below
from glue_compiler.passes.specialize_attention.attention_parts import Chain, Mask, NotAttention
from glue_compiler.passes.specialize_attention.gates import Gate
from glue_compiler.passes.specialize_attention.operands import before_widening, is_zeros, operand_behind
from glue_compiler.passes.specialize_attention.products import product_of
from glue_compiler.passes.specialize_attention.weights import (
    hidden_twice,
    is_filled_in,
    regrouped,
    softmax_behind,
    without_row_maximum,
    without_sinks,
)

aten = torch.ops.aten
_CHANGED = "softmax of scores that are changed in another way than by a scale, a soft cap and a mask"


def read_written_out(
    output: Value, call: Call, gate: Gate | None, reader: IndexReader
) -> tuple[tuple[Value, Value, Value], Chain] | None:
    """matmul(dropout(softmax(f * (cap(g * matmul(query, key^T)) + bias + mask))), value); None if the product is none.

    The operands, and what is between them.

    Rows and heads may be one dimension, ``[B * H, T, D]``, of any of the operands, and of the scores in any place.

    Args:
        gate: that ``call`` multiplies the second product by; None: ``call`` is that product.

    Raises:
        NotAttention: it is one in another form.
    """
    operators = reader.operators
    chain = Chain()
    if gate is not None:
        chain.gated, chain.sinks = gate.result, gate.sinks
        chain.links += [gate.result, *gate.links]
    outer = product_of(call if gate is None else operators.does(gate.result), operators)
    if outer is None or outer.is_transposed:
        return None
    if outer.factor != 1 or outer.added is not None or outer.unread is not None:
        return None
    weights = softmax_behind(outer.left, chain, operators)
    if weights is None or (gate is not None and (chain.has_sinks or weights != gate.scores)):
        return None
    of_weights = len(chain.links)
    weights = regrouped(weights, chain, operators)
    if gate is None:  # whose scores are what they are, and not their distances from the largest
        weights = without_row_maximum(weights, chain, operators)
    if chain.has_sinks:
        weights = without_sinks(weights, chain, operators)
    weights = _without_floor(weights, chain, reader)
    scores = _biased(_masked(weights, chain, reader), chain, operators)
    of_biased = chain.links[of_weights:]
    scores = _multiplied(scores, chain, output.node, operators)
    scores = _capped(scores, chain, operators)
    product = product_of(operators.does(scores), operators)
    if product is None or (chain.has_floor and chain.mask is None):
        raise NotAttention(_CHANGED)
    if product.unread is not None and _needs_gradient(product.unread, output.node, operators):
        raise NotAttention("what baddbmm does not read, for its beta of 0, gets a gradient of zeros")
    if product.added is not None and not is_zeros(product.added, output.node, reader):
        is_changed = chain.scale != 1 or chain.softcap is not None or chain.factors is not None
        if is_changed or chain.bias is not None or not _takes_a_bias(chain):
            raise NotAttention(_CHANGED)
        chain.bias = product.added
        of_biased = [*chain.links[of_weights:], scores]
    if chain.bias is not None:
        _require_exact_bias(chain.bias, of_biased, chain, operators)
    hidden_twice(chain, output.node, reader)
    chain.links.append(scores)
    chain.scale *= product.factor
    query = operand_behind(product.left, output.node, reader, is_transposed=False)
    key = operand_behind(product.right, output.node, reader, is_transposed=not product.is_transposed)
    value = operand_behind(outer.right, output.node, reader, is_transposed=False)
    chain.is_key_transposed = key is None and not product.is_transposed and operators.rank(product.right) == 4
    key = product.right if chain.is_key_transposed else key
    if query is None or key is None or value is None:
        return None
    query, key = (before_widening(each, output, operators) for each in (query, key))
    _require_one_grouping(query, chain, operators)
    nodes = [operators.node_of(link) for link in chain.links]
    nodes += [link.node for link in chain.links if isinstance(value_of(link.node), tuple)]
    if any(node is None or node.graph is not output.node.graph for node in nodes):
        return None
    chain.inside = _used_here_alone([node for node in nodes if node is not None], scores, output.node, operators)
    if any(operators.node_of(each) in chain.inside for each in _operands(chain)):
        raise NotAttention("scores are added to or multiplied by themselves")
    _require_one_autocast(chain.inside, output.node, operators)
    _require_one_precision((query, key, value), chain.links, output, operators)
    return (query, key, value), chain


def _needs_gradient(value: Value, output: fx.Node, operators: Operators) -> bool:
    return not Gradients(output, operators).are_cut_off and requires_grad(value_of(value.node))


def _require_exact_bias(bias: Value, links: list[Value], chain: Chain, operators: Operators) -> None:
    """What is made of scores to which ``bias`` was added, ``links``, holds all numbers that it may have.

    In a narrower dtype a large one is minus infinity, which hides a key.
    """
    wanted = operators.dtype(bias)
    for dtype in {*(operators.dtype(link) for link in links), *chain.dtypes}:
        if torch.promote_types(dtype, wanted) != dtype:
            raise NotAttention(f"a bias of {wanted} is added to its scores, which are rounded to {dtype}")


def _require_one_grouping(query: Value, chain: Chain, operators: Operators) -> None:
    """Require that ``[B * H]`` is split into rows and heads as the query splits it: masks are read of that split."""
    masks = [each for each in _operands(chain) if each != chain.bias]
    shapes = {link: operators.shape(link) for link in chain.links}
    merged = [operators.does(link) for link, shape in shapes.items() if len(shape) == 3]
    given = [each for each in masks if any(call and each in call.arguments.values() for call in merged)]
    if any(_is_of_rows_and_heads(each, operators) for each in given):
        raise NotAttention("its mask has one dimension for rows and heads together")
    if chain.bias is not None and any(call and chain.bias in call.arguments.values() for call in merged):
        chain.is_bias_merged = _is_of_rows_and_heads(chain.bias, operators)
    wanted = operators.shape(query)[:2]
    if merged and any(len(shape) == 4 and shape[:2] != wanted for shape in shapes.values()):
        raise NotAttention("rows and heads of its scores are not those of its query")


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
    for scores, low in bounds:
        if reader.operators.is_tensor(scores) and _filling(low, "hides", 1.0, value, reader) is not None:
            chain.has_floor = True
            chain.links.append(value)
            return regrouped(scores, chain, reader.operators)
    return value


def _masked(value: Value, chain: Chain, reader: IndexReader) -> Value:
    """Takes masks off the scores, and what they are multiplied by together."""
    operators = reader.operators
    behind = dataclasses.replace(chain, links=[], dtypes=[*chain.dtypes], scale=1.0)
    scores = _scaled(value, behind, operators)
    behind.factor = behind.scale
    behind.dtypes += [reader.dtype(link) for link in behind.links]
    match operators.does(scores):
        case Call(aten.add, {"self": Value(), "other": Value(), "alpha": 1 | -1 as sign}) as add:
            # In place the scores alone are written: they are in no other memory, as a mask may be.
            for inner, mask in add.either_way[: 1 if sign < 0 else 2]:
                unfilled = _without_fillings(inner, dataclasses.replace(behind, links=[]), reader)
                if operators.is_tensor(mask) and _are_scores(unfilled, operators):
                    dtype = reader.dtype(scores)
                    is_rounded = any(torch.promote_types(each, dtype) != each for each in behind.dtypes)
                    empty_rows: EmptyRows = "zeros" if chain.has_sinks else "nan"
                    behind.mask = Mask(mask, "added", None if is_rounded else empty_rows, sign * behind.factor)
                    behind.links.append(scores)
                    scores = inner
                    break
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
        value = regrouped(value, chain, reader.operators)
        match reader.operators.does(value):
            case Call(aten.where, {"condition": Value() as mask, "self": filling, "other": Value() as scores}) if (
                is_filled_in(filling, scores, reader.operators)
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
    empty_rows = _without_keys(low, chain)
    chain.mask = Mask(mask, role, empty_rows, chain.factor, chain.mask, low / chain.factor, reader.dtype(value))
    chain.links.append(value)
    return True


def _operands(chain: Chain) -> list[Value]:
    """What is added to the scores, hides some, or multiplies them."""
    masks = [each.value for each in chain.mask.parts] if chain.mask is not None else []
    return [*masks, *(each for each in (chain.bias, chain.factors) if each is not None)]


def _is_of_rows_and_heads(value: Value, operators: Operators) -> bool:
    """Of what is added to scores of three dimensions, or hides some."""
    shape = operators.shape(value)
    return len(shape) == 3 and shape[0] != 1


def _takes_a_bias(chain: Chain) -> bool:
    """May numbers be added to the scores before the mask of the chain?"""
    return chain.mask is not None and chain.factor == 1


def _biased(value: Value, chain: Chain, operators: Operators) -> Value:
    """Takes numbers off the scores, to which a mask is added, or in which it is filled."""
    if not _takes_a_bias(chain):
        return value
    value = regrouped(value, chain, operators)
    match operators.does(value):
        case Call(aten.add, {"self": Value(), "other": Value(), "alpha": 1}) as add:
            for scores, bias in add.either_way:
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
    if reader.operators.is_tensor(filling) and not reader.shape(filling):
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
    if not math.isfinite(filling):
        return "nan"
    return "mean" if chain.gated is None else "zeros"


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
        value = regrouped(value, chain, operators)
        call = operators.does(value)
        match call:
            case Call(aten.mul, {"self": scores, "other": factor}):
                pass
            case Call(operator, {"self": scores}) if operator in CONVERSIONS:
                factor = 1
            case Call(aten.add, {"self": scores, "other": 0 | 0.0}):
                factor = 1  # nothing is added where a model has no term of relative positions
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
    match operators.does(regrouped(value, Chain(), operators)):
        case Call(aten.add, {"self": Value() as first, "other": Value() as second, "alpha": 1}):
            return _is_product(first, operators) or _is_product(second, operators)
    return False


def _is_product(value: Value, operators: Operators) -> bool:
    behind = _scaled(value, Chain(), operators)
    if any(_is_capped(scores, operators) for scores, _ in _factors_of(behind, operators)):
        return True
    return _is_capped(value, operators)


def _is_capped(value: Value, operators: Operators) -> bool:
    return product_of(operators.does(_capped(value, Chain(), operators)), operators) is not None


def _multiplied(value: Value, chain: Chain, output: fx.Node, operators: Operators) -> Value:
    """Takes a tensor off the scores that they are multiplied by, after a soft cap."""
    if not _takes_a_bias(chain):
        return value
    behind = dataclasses.replace(chain, links=[])
    product = _scaled(value, behind, operators)
    for scores, factors in _factors_of(product, operators):
        is_known = factors.step != UNTRACKED and not Gradients(output, operators).reach(factors)
        if is_known and _is_capped(scores, operators):
            chain.links += [*behind.links, product]
            chain.scale, chain.factors = behind.scale, factors
            return scores
    return value


def _factors_of(value: Value, operators: Operators) -> list[tuple[Value, Value]]:
    """The scores and the tensor that they may be multiplied by in ``value``, either way round."""
    match operators.does(value):
        case Call(aten.mul, {"self": Value(), "other": Value()}) as times:
            return times.either_way if all(map(operators.is_tensor, times.either_way[0])) else []
    return []


def _used_here_alone(links: list[fx.Node], scores: Value, output: fx.Node, operators: Operators) -> tuple[fx.Node, ...]:
    def reads_sizes(user: fx.Node, node: fx.Node) -> bool:
        return _reads_sizes_alone(user, node, scores, operators)

    found = nodes_used_alone(links, output, operators, reads_sizes)
    if isinstance(found, fx.Node):
        raise NotAttention("the attention weights or scores are used elsewhere too")
    return found


def _reads_sizes_alone(user: fx.Node, node: fx.Node, scores: Value, operators: Operators) -> bool:
    """Does ``user`` expand another tensor to the sizes of ``node``, which are all that it takes of it?

    They are those of the scores ``[B, H, Q, K]``, and not of a row's maximum, or of scores with sinks.
    """
    if not is_call(user) or len(user.all_input_nodes) != 2:
        return False
    shape = operators.shape(operators.value(node))
    if len(shape) != 4 or shape[-2:] != operators.shape(scores)[-2:]:
        return False
    match operators.calls(user):
        case [Call(aten.expand, {"self": Value() as source})]:
            return source != operators.value(node)
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
    of_operands = {operators.dtype(each) for each in operands}
    is_cast = torch.is_autocast_enabled(wanted.device.type)
    is_cast = is_cast or bool(operators.mode(output.node).autocast)
    if of_operands != {wanted.dtype} and not (is_cast and torch.float64 not in of_operands):
        names = ", ".join(sorted(str(each) for each in of_operands | {wanted.dtype}))
        raise NotAttention(f"its parts are of several dtypes: {names}")
    for each in {operators.dtype(link) for link in links}:
        if torch.promote_types(each, wanted.dtype) != each:
            raise NotAttention(f"its parts are of several dtypes: {each} between {wanted.dtype}")
