"""Reads logits that ranks share: each makes those of its own classes (tensor parallelism), and they are gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from glue_compiler.compat.dtensor_calls import arguments_of, is_dtensor
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.values import value_of
from glue_compiler.passes.chunk_loss.heads import Head, Matrix, Shared, Term

aten = torch.ops.aten


def read_shared(value: Value, operators: Operators) -> Head | None:
    """The head whose logits, gathered from the ranks of a mesh of one dimension, ``value`` is; None if it is none.

    Its product, what is gathered, and that as a plain tensor are ``inside``.
    """
    whole = _given_to(value.node, "to_local", operators)
    product = _given_to(whole.node, "redistribute", operators) if whole is not None else None
    if whole is None or product is None or operators.value(value.node) != value:
        return None
    match operators.does(product):
        case Call(aten.linear, {"input": Value() as rows, "weight": Value() as weight, "bias": bias}):
            pass
        case _:
            return None
    if bias is not None and not isinstance(bias, Value):
        return None
    parts = [weight, *([bias] if bias is not None else [])]
    if not all(is_dtensor(value_of(each.node)) for each in (rows, whole, product, *parts)):
        return None
    made, given = value_of(product.node), value_of(weight.node)
    mesh, classes, everywhere = given.device_mesh, given.shape[0], value_of(whole.node)
    if any(value_of(each.node).device_mesh != mesh for each in (rows, whole, product, *parts)) or mesh.ndim != 1:
        return None
    is_shared = _is_shared(made, made.dim() - 1) and all(_is_shared(value_of(each.node), 0) for each in parts)
    if not (is_shared and _is_whole(value_of(rows.node)) and _is_whole(everywhere)):
        return None
    if given.dim() != 2 or everywhere.dtype != made.dtype or classes % mesh.size():
        return None
    own = classes // mesh.size()
    term = Term(rows, Matrix(weight), bias, made.dtype)
    shared = Shared(mesh.get_local_rank() * own, own)
    return Head(value, (term,), (product, whole, value), classes, operators.meta(value).device, shared)


def _given_to(node: fx.Node, method: str, operators: Operators) -> Value | None:
    """The DTensor of which ``node`` is a call of ``method``, with nothing said of gradients or dtypes."""
    found = arguments_of(node, method)
    if found is None or not isinstance(node.args[0], fx.Node) or not is_dtensor(value_of(node.args[0])):
        return None
    positional, named = found
    harmless = {"placements", "async_op", "device_mesh"} if method == "redistribute" else set()
    given = {name for name, argument in named.items() if argument is not None}
    if len(positional) > (2 if method == "redistribute" else 0) or not given <= harmless:
        return None
    return operators.found(node.args[0], node)


def _is_whole(tensor: Any) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def _is_shared(tensor: Any, dim: int) -> bool:
    return all(placement.is_shard(dim) for placement in tensor.placements)
