"""Reads logits that ranks share: each makes those of its own classes (tensor parallelism), and they are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.dtensor_calls import arguments_of, is_dtensor
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.values import value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Shared:
    """This rank's part of a head's classes: ``classes`` of them, from class ``first`` on. Each rank has as many."""

    first: int
    classes: int


@dataclass(frozen=True)
class SharedProduct:
    """Logits ``[*lead, V]``, which each rank has gathered.

    Attributes:
        rows: a DTensor that each rank has whole, ``[*lead, K]``.
        weight: a DTensor ``[V, K]`` whose rows are shared; ``bias`` ``[V]`` or None, likewise.
        inside: the product, what is gathered, and that as a plain tensor.
    """

    rows: Value
    weight: Value
    bias: Value | None
    dtype: torch.dtype
    inside: tuple[Value, ...]
    shared: Shared


def read_shared(value: Value, operators: Operators) -> SharedProduct | None:
    """``value`` as logits gathered from the ranks of a mesh of one dimension; None if it is made in another way."""
    local = value.node
    whole = _given_to(local, "to_local", operators)
    if whole is None or operators.value(local) != value:
        return None
    product = _given_to(whole.node, "redistribute", operators)
    if product is None:
        return None
    match operators.does(product):
        case Call(aten.linear, {"input": Value() as rows, "weight": Value() as weight, "bias": bias}):
            pass
        case _:
            return None
    found = [rows, weight, *([bias] if bias is not None else [])]
    tensors = [value_of(each.node) if isinstance(each, Value) else None for each in (*found, product, whole)]
    if not all(map(is_dtensor, tensors)) or operators.rank(weight) != 2:
        return None
    of_rows, of_weight, *of_bias, of_product, of_whole = tensors
    meshes = {each.device_mesh for each in tensors if each is not None}
    if len(meshes) != 1 or of_weight.device_mesh.ndim != 1:
        return None
    if not (_is_whole(of_rows) and _is_whole(of_whole) and all(_is_shared(each, 0) for each in (of_weight, *of_bias))):
        return None
    ranks, classes = of_weight.device_mesh.size(), of_weight.shape[0]
    if not _is_shared(of_product, of_product.dim() - 1) or of_whole.dtype != of_product.dtype or classes % ranks:
        return None
    each = classes // ranks
    shared = Shared(of_weight.device_mesh.get_local_rank() * each, each)
    return SharedProduct(rows, weight, bias, of_product.dtype, (product, whole, value), shared)


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
