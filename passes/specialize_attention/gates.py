"""Results of attention that are multiplied by what attention sinks leave of the weights, from their logsumexp."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glue_compiler.fx.index_expressions import IndexReader
from glue_compiler.fx.index_operators import CONVERSIONS
from glue_compiler.fx.index_views import Element, NotAView, broadcast_index, source_of
from glue_compiler.fx.operators import Call, Value
from glue_compiler.passes.specialize_attention.operands import places
from glue_compiler.passes.specialize_attention.products import product_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Gate:
    """``result * sigmoid(logsumexp(scores) - sinks)``: a softmax of the scores and one more, whose value is zero.

    With z = sum(exp(scores)), the weights of ``result`` are exp(scores) / z, and the sigmoid is z / (z + exp(sinks)).

    Attributes:
        result: a product ``[B, H, Q, D]``. scores: ``[B, H, Q, K]``.
        sinks: the element of a tensor that is taken for row b, head h and query t.
        links: the values from the scores to what ``result`` is multiplied by.
    """

    result: Value
    scores: Value
    sinks: Element
    links: tuple[Value, ...]


def read_gate(output: Value, call: Call, reader: IndexReader) -> Gate | None:
    """The gate that ``output``, a product of elements, is the result of; None if it is none."""
    for result, factor in call.either_way:
        if not all(reader.operators.is_tensor(each) for each in (result, factor)):
            return None
        is_whole = reader.operators.rank(result) == 4 and reader.shape(result) == reader.shape(output)
        if is_whole and product_of(reader.operators.does(result), reader.operators) is not None:
            found = _factor(factor, reader)
            if found is not None:
                return Gate(result, *found)
    return None


def _factor(factor: Value, reader: IndexReader) -> tuple[Value, Element, tuple[Value, ...]] | None:
    """Scores, sinks and links of ``sigmoid(logsumexp(scores) - sinks)``, which is the same for all of a value."""
    operators = reader.operators
    links: list[Value] = []
    found = _computed(Element(factor, broadcast_index(places(4), reader.shape(factor))), links, reader)
    match operators.does(found.value):
        case Call(aten.sigmoid, {"self": Value() as logit}):
            found = _computed(Element(logit, found.index), links, reader)
        case _:
            return None
    match operators.does(found.value):
        case Call(aten.add, {"self": Value() as minuend, "other": Value() as sinks, "alpha": -1}):
            pass
        case _:
            return None
    if not all(operators.is_tensor(each) for each in (minuend, sinks)):
        return None
    of_sinks = Element(sinks, broadcast_index(found.index, reader.shape(sinks)))
    found = _computed(Element(minuend, broadcast_index(found.index, reader.shape(minuend))), links, reader)
    match operators.does(found.value):
        case Call(aten.logsumexp, {"self": Value() as scores, "dim": (int() as dim,)}):
            is_over_keys = operators.rank(scores) == 4 and dim in (3, -1)
            rows = broadcast_index(places(4), (*reader.shape(scores)[:3], 1))
            is_of_rows = found.index in (rows, rows[:3])
            return (scores, of_sinks, tuple(links)) if is_over_keys and is_of_rows else None
    return None


def _computed(element: Element, links: list[Value], reader: IndexReader) -> Element:
    """The element behind views and conversions; ``links`` gets those, and what the element is of."""
    while True:
        links.append(element.value)
        call = reader.operators.does(element.value)
        if call is None or call.operator is aten.detach:
            return element
        if call.operator in CONVERSIONS and reader.operators.is_tensor(call.arguments["self"]):
            element = Element(call.arguments["self"], element.index)
            continue
        try:
            element = source_of(reader.operators, element.value, element.index)
        except NotAView:
            return element
