"""Finds attention in a captured graph: ``scaled_dot_product_attention``, and softmax between two products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import sympy
import torch
from torch import fx

from glue_compiler.fx.gradient_strides import strides_are_seen
from glue_compiler.fx.gradients import Gradients
from glue_compiler.fx.index_expressions import IndexReader
from glue_compiler.fx.index_views import Element, Index, broadcast_index
from glue_compiler.fx.operators import Call, Operators, Value
from glue_compiler.fx.value_numbering import Scope
from glue_compiler.fx.values import is_call, value_of
from glue_compiler.passes.specialize_attention.attention_parts import AttentionSite, Chain, Mask, NotAttention
from glue_compiler.passes.specialize_attention.gates import read_gate
from glue_compiler.passes.specialize_attention.operands import elements_behind, places
from glue_compiler.passes.specialize_attention.written_out import read_written_out

aten = torch.ops.aten

_ENDS = (aten.scaled_dot_product_attention, aten.matmul, aten.einsum, aten.mul)
"""What gives the result of an attention."""


Found = AttentionSite | tuple[fx.Node, str]
"""An attention, or a node and why what it gives is left alone at first sight."""


def attention_sites(scope: Scope, reader: IndexReader, candidates: Mapping[fx.Node, str]) -> Iterable[Found]:
    """The attentions in one graph that have a mask, and (node, reason) for those that are left alone at first sight.

    Args:
        candidates: see :func:`products_with_softmax`.
    """
    operators = reader.operators
    sites: dict[fx.Node, Found] = {}
    for node in scope.graph.nodes:
        found = value_of(node)
        if not is_call(node) or not isinstance(found, torch.Tensor):
            continue
        if found.dim() not in (3, 4) or not found.is_floating_point() or not operators.dispatches(node, _ENDS):
            continue
        value = operators.value(node)
        call = operators.does(value, *_ENDS) if value.node is node else None
        if call is None or call.written:
            continue
        gate = read_gate(value, call, reader) if call.operator is aten.mul else None
        if gate is None and call.operator is aten.mul:
            continue
        site: Found | None
        try:
            if call.operator is aten.scaled_dot_product_attention:
                site = _operator_site(node, call, scope, reader)
            else:
                found_here = read_written_out(value, call, gate, reader)
                site = _site(scope, reader, node, *found_here) if found_here is not None else None
        except NotAttention as reason:
            site = node, str(reason)
        if site is None:
            continue
        if gate is not None:
            sites.pop(gate.result.node, None)  # what was said of it, which this is a part of
        sites[node] = site
    known = {*sites, *(node for site in sites.values() if isinstance(site, AttentionSite) for node in site.inside)}
    unknown = [(node, why) for node, why in candidates.items() if node not in known]
    return [*sites.values(), *(each for each in unknown if each[0].graph is scope.graph)]


def _operator_site(node: fx.Node, call: Call, scope: Scope, reader: IndexReader) -> AttentionSite | None:
    given = call.arguments
    mask = given["attn_mask"]
    if mask is None:
        return None
    if not isinstance(mask, Value) or given["is_causal"]:
        raise NotAttention("a mask that is no tensor, or one beside is_causal")
    role: Literal["shows", "added"] = "shows" if reader.dtype(mask) == torch.bool else "added"
    chain = Chain(
        mask=Mask(mask, role, "zeros"),
        dropout=given["dropout_p"],
        scale=given["scale"],
        is_grouped=given["enable_gqa"],
    )
    return _site(scope, reader, node, (given["query"], given["key"], given["value"]), chain)


def _site(
    scope: Scope, reader: IndexReader, output: fx.Node, operands: tuple[Any, Any, Any], chain: Chain
) -> AttentionSite:
    operators, inside, is_grouped = reader.operators, chain.inside, chain.is_grouped
    query, key, value = (_node_at(each, output, operators) for each in operands)
    _require_supported_numbers(chain.dropout, chain.scale)
    shapes = [reader.shape(operators.value(node)) for node in (query, key, value, output)]
    (batch, heads, length, size), of_key, of_value, of_output = shapes
    if chain.is_key_transposed:
        of_key = (*of_key[:2], of_key[3], of_key[2])
    if len(of_output) == 3:
        of_output = (batch, heads, *of_output[1:])  # products of the operands, with rows and heads as one dimension
    if any(each == 0 for shape in shapes for each in shape):
        raise NotAttention("there is nothing to attend to")
    if of_key[:3] != of_value[:3] or of_key[0] != batch or of_output[:3] != (batch, heads, length):
        raise NotAttention("query, key, value or mask are broadcast to each other")
    if of_key[3] != size or of_output[3] != of_value[3]:
        raise NotAttention("query, key and value have no sizes that are known to fit")
    if of_key[1] != heads and not is_grouped:
        # Of heads a product and sdpa broadcast a single one, which is what kernels call a group of all.
        if of_key[1] != 1:
            raise NotAttention("the heads of keys are not those of queries")
        is_grouped = True
    readers = {user for node in inside for user in node.users} - {output, *inside}
    if any(user < operand for user in readers for operand in (query, key)):
        raise NotAttention("the sizes of its scores are used before those of query and key are known")
    gradients = Gradients(output, operators)
    if not all(map(gradients.pass_through, inside)):
        raise NotAttention("gradients are switched off for a part of it")
    if inside and not gradients.are_cut_off and strides_are_seen([query, key, value], operators):
        raise NotAttention("a hook or a backward of your own gets its gradients, and may depend on their strides")
    grouped_key, grouped_value = (
        _before_repeat(node, each, heads, gradients, reader)
        for node, each in zip((key, value), operands[1:], strict=True)
    )
    if (
        chain.is_key_transposed
        or len({reader.shape(operators.value(node))[1] for node in (grouped_key, grouped_value)}) > 1
    ):
        grouped_key, grouped_value = key, value
    sinks = _sinks(chain.sinks, heads, gradients, reader) if chain.sinks is not None else None
    # What autograd does not save in eager may be written later; of the result backward gets a copy of its own then.
    saved = (query, grouped_key, grouped_value, *(() if inside else (output,)))
    if not gradients.may_save(*saved, *([sinks] if sinks is not None else [])):
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
        length == of_key[2],
        chain.mask,
        float(chain.dropout),
        float(chain.scale) if chain.scale is not None else None,
        chain.softcap,
        sinks,
        chain.gated is not None,
        chain.bias,
        chain.is_bias_merged,
        chain.factors,
        inside,
        chain.is_key_transposed,
    )


def _node_at(value: Any, output: fx.Node, operators: Operators) -> fx.Node:
    """The node of a query, key or value; the output finds in its memory what the attention reads."""
    if not operators.is_tensor(value) or operators.rank(value) != 4:
        raise NotAttention("query, key and value are not plain tensors of four dimensions")
    node = operators.operand(value, output)
    if node is None:
        raise NotAttention("the memory of query, key or value is written in place inside of it")
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


def _before_repeat(node: fx.Node, value: Value, heads: Any, gradients: Gradients, reader: IndexReader) -> fx.Node:
    """The tensor of fewer heads in which each query head finds what it finds in ``value``; ``node``, its own, if there
    is none.
    """
    operators = reader.operators
    shape, wanted = reader.shape(value), places(4)
    own = shape[1]
    if not isinstance(heads, int) or not isinstance(own, int) or heads % own:
        return node

    def of_groups(shape: tuple[Any, ...]) -> Index:
        """Where a query head finds its own in a tensor that has ``shape[1]`` heads."""
        return broadcast_index((wanted[0], sympy.floor(wanted[1] / (heads // shape[1])), *wanted[2:]), shape)

    for element in elements_behind(Element(value, of_groups(shape)), gradients):
        source = reader.shape(element.value)
        if len(source) != 4 or not isinstance(source[1], int) or source[1] < 1:
            continue
        if source[1] >= own or heads % source[1] or (source[0], *source[2:]) != (shape[0], *shape[2:]):
            continue
        if element.index == of_groups(source):
            found = operators.node_of(element.value)
            if found is not None and found.graph is node.graph and operators.is_kept(element.value, gradients.output):
                return found
    return node


def _sinks(element: Element, heads: Any, gradients: Gradients, reader: IndexReader) -> fx.Node | None:
    """The scores ``[Hq]`` of which ``element`` is that of a head; or those ``[B, Hq, Q, 1]``, ``[B, Hq, Q]`` or
    ``[Hq, Q]`` of which it is that of a query."""
    operators, whole = reader.operators, element.value
    if not reader.shape(whole):
        raise NotAttention("attention sinks that are one number for all heads")
    wanted = places(4)[:3]
    rank = len(reader.shape(whole))
    of_query = (*wanted, sympy.Integer(0)) if rank == 4 else wanted
    is_for_all = reader.shape(whole) == (1,)
    is_of_queries = (rank > 1 or is_for_all) and element.index == broadcast_index(of_query, reader.shape(whole))
    for behind in elements_behind(element, gradients):
        if reader.shape(behind.value) == (heads,) and behind.index == broadcast_index(wanted[1:2], (heads,)):
            found = operators.node_of(behind.value)
            is_here = found is not None and found.graph is gradients.output.graph
            if is_here and operators.is_kept(behind.value, gradients.output):
                return found
    found = operators.operand(whole, gradients.output) if is_of_queries else None
    if found is None or found.graph is not gradients.output.graph:
        raise NotAttention("attention sinks that are not in memory where the attention is")
    return found
