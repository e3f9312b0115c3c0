"""Products with a softmax, in whatever form: what is not specialised has a reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from glue_compiler.fx.flow import CONVERSIONS, Flow, Result, Rules
from glue_compiler.fx.operators import Call, Operators
from glue_compiler.fx.private_nodes import readers_of
from glue_compiler.fx.values import is_call

aten = torch.ops.aten
PRODUCTS = (aten.matmul, aten.einsum, aten.baddbmm)
_KEPT = (aten.view, aten.unsqueeze, aten.permute, aten.slice, *CONVERSIONS, aten.clone, aten.where)


@dataclass(frozen=True)
class Weights:
    """Made of a softmax of ``rank`` dimensions; ``is_written_out`` as exponentials and their sum."""

    rank: int
    is_written_out: bool = False


WEIGHTS = Rules[Weights]()


@WEIGHTS.begin(aten.softmax)
def _softmax(made: Result) -> Weights | None:
    return Weights(len(made.shape)) if len(made.shape) in (3, 4) else None


@WEIGHTS.begin(aten.exp)
def _exponential(made: Result) -> Weights | None:
    match made.operators.does(made["self"]):
        case Call(aten.log_softmax):
            return Weights(len(made.shape), True)
        case Call(aten.add, {"other": total, "alpha": -1}) if made.operators.does(total, aten.logsumexp) is not None:
            return Weights(len(made.shape), True)
    return None


@WEIGHTS.begin(aten.div)
def _quotient(made: Result) -> Weights | None:
    exponential, total = made["self"], made["other"]
    exp, summed = made.operators.does(exponential, aten.exp), made.operators.does(total, aten.sum)
    is_known = exp is not None and summed is not None and summed.arguments["self"] == exponential
    return Weights(len(made.shape), True) if is_known else None


@WEIGHTS(*_KEPT, of=("self", "other"))
def _kept(weights: Weights, made: Result) -> Weights:
    return weights


@WEIGHTS(aten.dropout)
def _dropped(weights: Weights, made: Result) -> Weights:
    return weights


def products_with_softmax(operators: Operators) -> dict[fx.Node, str]:
    """The nodes that multiply what is made of a softmax with something, each with why that may be no attention."""
    found: dict[fx.Node, str] = {}
    for made, weights in Flow(operators, WEIGHTS).ends():
        for reader in readers_of(made.value, operators):
            if _is_product(reader, weights.rank, operators):
                found[reader] = (
                    "its softmax is written as exponentials and their sum"
                    if weights.is_written_out
                    else "softmax between two products that are not of query, key and value [B, H, T, D]"
                )
    return found


def _is_product(node: fx.Node, rank: int, operators: Operators) -> bool:
    """One that adds up products: by an operator, or as a product of more dimensions than the softmax has."""
    if not is_call(node):
        return False
    calls = operators.calls(node) or ()
    return any(
        call.operator in PRODUCTS or (call.operator is aten.mul and _rank(node, operators) > rank) for call in calls
    )


def _rank(node: fx.Node, operators: Operators) -> int:
    value = operators.value(node)
    return operators.rank(value) if operators.is_tensor(value) else 0
