"""What is between softmax and the product with values, when attention is written out, and what softmax is taken of."""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.fx.index_expressions import IndexReader, Unreadable
from glue_compiler.fx.index_numbers import as_boolean
from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.index_views import Element, NotAView, broadcast_index
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.passes.specialize_attention.attention_parts import Chain, Filling, Mask, NotAttention
from glue_compiler.passes.specialize_attention.operands import is_zeros, places, regrouped_from

aten = torch.ops.aten
_ROW_AND_HEAD = sympy.Symbol("bh", integer=True, nonnegative=True)
"""A place where rows and heads are one dimension: no head."""


def softmax_behind(weights: Any, chain: Chain, operators: Operators) -> Value | None:
    """What the softmax over keys behind ``weights`` is taken of; None if there is none."""
    while operators.is_tensor(weights):
        call = operators.does(weights)
        if call is None:
            return None
        chain.links.append(weights)
        match call:
            case Call(aten.softmax, {"self": scores, "dim": dim}):
                rank = operators.rank(weights)
                is_over_keys = rank in (3, 4) and isinstance(dim, int) and dim % rank == rank - 1
                chain.dtypes.append(operators.dtype(weights))
                return scores if is_over_keys and operators.is_tensor(scores) else None
            case Call(aten.dropout, {"input": kept, "p": p, "train": train}):
                if train and p != 0:
                    if chain.dropout:
                        raise NotAttention("it has two dropouts")
                    chain.dropout = p
                weights = kept
            case Call(aten.where, {"condition": mask, "self": filling, "other": kept}) if is_filled_in(
                filling, kept, operators
            ):
                chain.fillings.append(Filling(weights, kept, mask, "hides", filling))
                weights = kept
            case Call(aten.where, {"condition": mask, "self": Value() as kept, "other": filling}):
                chain.fillings.append(Filling(weights, kept, mask, "shows", filling))
                weights = kept
            case Call(aten.slice, {"self": Value() as part}) if not chain.has_sinks:
                if not _is_all_but_the_last(call, part, weights, operators):
                    return None
                chain.has_sinks = True
                weights = part
            case _ if call.operator in CONVERSIONS:
                weights = call.arguments["self"]
            case _:
                weights = regrouped_from(weights, operators)
    return None


def is_filled_in(filling: Any, tensor: Any, operators: Operators) -> bool:
    """Is ``filling`` a number, or a tensor of one, in place of items of ``tensor``?"""
    is_number = not operators.is_tensor(filling) or not operators.rank(filling)
    return is_number and operators.is_tensor(tensor) and operators.rank(tensor) > 0


def regrouped(value: Value, chain: Chain, operators: Operators) -> Value:
    """Takes views off the scores that make one dimension of rows and heads, or two of one; and copies."""
    while (before := regrouped_from(value, operators)) is not None:
        chain.links.append(value)
        value = before
    return value


def hidden_twice(chain: Chain, output: fx.Node, reader: IndexReader) -> None:
    """Takes zeros that are filled in the weights for those that the mask of the scores has made there.

    Only a query that sees no key tells them apart: all of its weights are zeros then.

    Raises:
        NotAttention: something else is filled in, or elsewhere.
    """
    for each in chain.fillings:
        mask = chain.mask
        shapes = {reader.shape(value) for value in (each.filled, each.weights)}
        is_zero = each.value == 0 if isinstance(each.value, int | float) else is_zeros(each.value, output, reader)
        if mask is None or mask.also is not None or len(shapes) > 1 or not is_zero or not _is_same(mask, each, reader):
            raise NotAttention(
                "weights of the softmax are filled in elsewhere than where the mask hides a key, or not by 0"
            )
        if chain.factors is not None:
            raise NotAttention("zeros are filled in its weights, and its scores are multiplied before they are masked")
        if mask.empty_rows == "mean" and chain.bias is not None:
            # Where they hide all keys that the mask shows, weights that are zeros now were not before.
            raise NotAttention(
                "zeros are filled in its weights, and numbers are added to its scores before finite ones"
            )
        if mask.empty_rows is not None:
            chain.mask = dataclasses.replace(mask, empty_rows="zeros")


def _is_same(mask: Mask, filling: Filling, reader: IndexReader) -> bool:
    """Does ``mask`` hide the keys whose weights are filled in?"""
    operators = reader.operators
    if mask.role == "added" or not operators.is_tensor(filling.mask):
        return False
    of_mask, of_filling = (places(operators.rank(each)) for each in (mask.value, filling.mask))
    if len(of_filling) == 3 and operators.rank(filling.weights) == 3:
        of_filling = (_ROW_AND_HEAD, *of_filling[1:])
    try:
        of_scores = as_boolean(reader.read(mask.value, of_mask))
        of_weights = as_boolean(reader.read(filling.mask, of_filling))
    except (Unreadable, NotAView):
        return False
    return bool(of_scores == (of_weights if mask.role == filling.role else sympy.Not(of_weights)))


def _is_all_but_the_last(call: Call, whole: Value, part: Value, operators: Operators) -> bool:
    before, after = operators.shape(whole), operators.shape(part)
    starts, steps = call.arguments["start"] in (None, 0), call.arguments["step"] == 1
    return starts and steps and (*before[:-1], before[-1] - 1) == tuple(after)


def without_row_maximum(value: Value, chain: Chain, operators: Operators) -> Value:
    """Takes the subtraction of a row's maximum off the scores, which softmax does not see."""
    match operators.does(value):
        case Call(aten.add, {"self": Value() as scores, "other": Value() as most, "alpha": -1}):
            if _is_row_maximum(most, scores, operators):
                chain.links += [value, most]
                return scores
    return value


def without_sinks(value: Value, chain: Chain, operators: Operators) -> Value:
    """Takes the column of sinks off the scores."""
    match operators.does(value):
        case Call(aten.cat, {"tensors": (Value() as scores, Value() as sinks), "dim": int() as dim}):
            column = operators.shape(sinks) if operators.is_tensor(sinks) else (None,)
            if operators.is_tensor(scores) and operators.rank(scores) == 4 and dim % 4 == 3 and column[-1] == 1:
                chain.links.append(value)
                chain.sinks = Element(sinks, broadcast_index((*places(4)[:3], sympy.Integer(0)), column))
                return scores
    raise NotAttention("only a part of the softmax is used, and the rest of it are no attention sinks")


def _is_row_maximum(value: Value, scores: Value, operators: Operators) -> bool:
    match operators.does(value):
        case Call(aten.max | aten.amax, {"self": of, "dim": int() | (int(),) as dim, "keepdim": True}):
            dim, rank = dim[0] if isinstance(dim, tuple) else dim, operators.rank(scores)
            return of == scores and not value.leaf and dim % rank == rank - 1
    return False
