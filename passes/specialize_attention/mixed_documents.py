"""Finds what mixes a packed batch's documents, which attention keeps apart: convolutions, sums and loops over tokens.

A graph computes what eager computes: nothing is changed. It is no proof either, and what is not understood is not
named: an operator is, if it computes a token from others of its row, and nothing that the documents are known from
comes to it, back to the product with weights or the attention that it starts from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.compat import symbols
from glue_compiler.compat.layers import layer_of
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.reachable import reachable
from glue_compiler.fx.values import expression, has_value, inputs_of, value_in, value_of
from glue_compiler.ops import known_masks
from glue_compiler.passes.specialize_attention.analysis import AttentionPlan
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader

aten, _glue = torch.ops.aten, torch.ops.glue

_CONVOLUTIONS = {aten.conv1d, aten.conv2d, aten.convolution, aten._convolution}
_SUMS = {aten.cumsum, aten.cumprod, aten.logcumsumexp}
_STARTS = {
    # What a walk back does not go beyond.
    aten.linear, aten.embedding, aten.addmm, aten.mm, aten.scaled_dot_product_attention, _glue.packed_attention,
    _glue.masked_attention,
}  # fmt: skip


@dataclass(frozen=True)
class Mixed:
    """``node`` computes a token from others of its row; ``how`` in words."""

    node: fx.Node
    how: str

    def __str__(self) -> str:
        return f"{layer_of(self.node) or self.node.name} ({self.how})"


def mixed_documents(plan: AttentionPlan, reader: MaskReader, graph: fx.Graph) -> list[Mixed]:
    """Of the graph in which ``plan`` has proved documents, or that is given tokens of which a mask in memory has some.

    To be called before ``plan`` is applied.
    """
    known: dict[fx.Node, None] = {}
    lengths: dict[Any, Any] = {}
    for replacement in plan.replacements:
        documents = replacement.visibility.documents if replacement.visibility is not None else ()
        for name in {f.func.__name__ for vector in documents for f in vector.atoms(sympy.core.function.AppliedUndef)}:
            known[reader.leaves[name].node] = None
            length = value_of(replacement.site.output).shape[-2]
            lengths[expression(length)] = length
    lengths = lengths if known else _lengths_of_given(graph)
    if not lengths:
        return []
    operators = reader.operators
    # What tells documents apart, given to a layer without attention, is whatever is no float.
    sources = _sources(known or [node for node in inputs_of(graph) if has_value(node) and not _is_floating(node)])
    return [
        Mixed(node, how)
        for node in operators.numbering.nodes
        if (how := _how(node, operators, [*lengths.values()])) and not _is_computed_from(sources, node, operators)
    ]


def _lengths_of_given(graph: fx.Graph) -> dict[Any, Any]:
    """Sizes ``T`` of inputs ``[B, T, ...]`` of as many tokens as a mask with documents that is in memory."""
    lengths = known_masks.lengths_with_documents()
    given = (value_of(node) for node in inputs_of(graph) if lengths and has_value(node) and _is_floating(node))
    sizes = [value.shape[1] for value in given if isinstance(value, torch.Tensor) and value.dim() >= 3]
    return {expression(size): size for size in sizes if symbols.size_when_traced(size) in lengths}


def _how(node: fx.Node, operators: Operators, lengths: Collection[Any]) -> str:
    """How ``node`` mixes tokens; ``""`` if it does not, as far as is known."""
    if node.target is _glue.counted_loop.default:
        return "a loop of steps over its tokens" if _goes_over(node, lengths) else ""
    for call in operators.calls(node) or ():
        if call.operator in _CONVOLUTIONS:
            return _convolution(call, operators, lengths)
        if call.operator in _SUMS:
            result = operators.meta(Value(node, operators.calls(node).index(call)))  # type: ignore[union-attr]
            if result.dtype.is_floating_point and _is_one(result.shape[call.arguments["dim"]], lengths):
                return "a running sum or product over its tokens"
    return ""


def _convolution(call: Call, operators: Operators, lengths: Collection[Any]) -> str:
    weight = operators.shape(call.arguments["weight"])
    given = operators.shape(call.arguments["input"])
    made = call.recorded.results[0].shape
    for dim in range(2, len(weight)):
        if weight[dim] != 1 and (_is_one(given[dim], lengths) or _is_one(made[dim], lengths)):
            return f"a convolution over {weight[dim]} tokens"
    return ""


def _is_one(size: Any, lengths: Iterable[Any]) -> bool:
    return any(expression(length) == size for length in lengths)


def _goes_over(loop: fx.Node, lengths: Iterable[Any]) -> bool:
    """Do the steps, each of as many tokens as the next dimension has, make up a row?"""
    (_, steps, _, fixed, _) = loop.args
    count = value_in(steps)
    count = symbols.size_when_traced(count)
    rows = [symbols.size_when_traced(length) for length in lengths]
    for tensor in map(value_of, fixed):  # type: ignore[arg-type]
        sizes = [symbols.size_when_traced(size) for size in tensor.shape]
        for size, inner in zip(sizes, [*sizes[1:], 1], strict=True):
            if count is not None and size == count and any(_make_up(count, inner or 0, row or 0) for row in rows):
                return True
    return False


def _make_up(steps: int, tokens: int, row: int) -> bool:
    """Are so many steps of so many tokens a row, or more, as the last one may be padded?"""
    return row in (steps, min(row, steps * tokens))


def _sources(known: Iterable[fx.Node]) -> set[fx.Node]:
    """``known``, and the inputs that they are computed from."""
    found = reachable(known, lambda node: node.all_input_nodes)
    made = {node for node in found if node.op == "placeholder" and not _is_floating(node)}
    return made | set(known)


def _is_floating(node: fx.Node) -> bool:
    value = value_of(node)
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def _is_computed_from(sources: set[fx.Node], node: fx.Node, operators: Operators) -> bool:
    """Does a walk back from ``node``, out of bodies too, come to one of ``sources``?"""
    passed: dict[fx.Node, Any] = {}
    for scope in operators.numbering.scopes:
        if scope.call is not None:
            passed.update(zip(scope.call.placeholders, scope.call.operands, strict=True))

    def operands(each: fx.Node) -> list[fx.Node]:
        if each is not node and (each in sources or operators.dispatches(each, _STARTS)):
            return []
        outer = passed.get(each)
        return [*([outer] if isinstance(outer, fx.Node) else []), *each.all_input_nodes]

    return not sources.isdisjoint(reachable([node], operands) - {node})


def in_words(found: list[Mixed]) -> str:
    """Names the layers, those of one kind together."""
    kinds: dict[tuple[str, str], list[Mixed]] = {}
    for each in found:
        kinds.setdefault((re.sub(r"\d+", "", layer_of(each.node)), each.how), []).append(each)
    named = [f"{group[0]}" + (f" and {len(group) - 1} more like it" if group[1:] else "") for group in kinds.values()]
    return ", ".join(named[:4]) + (f", and {len(named) - 4} other kinds" if named[4:] else "")
