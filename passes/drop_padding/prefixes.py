"""Beginnings that rows of a batch share, of which each token is computed once. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from glue_compiler.fx.effects import Kind
from glue_compiler.fx.flow import Refused
from glue_compiler.fx.operators import Operators
from glue_compiler.fx.values import StorageKey, leaves, storages_of, tensors_in, value_of
from glue_compiler.passes.drop_padding.domain import Attention
from glue_compiler.passes.drop_padding.plan import Plan
from glue_compiler.passes.drop_padding.steps import Entering, Step
from glue_compiler.passes.drop_padding.token_facts import Rows
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader


def share_prefixes(plan: Plan, reader: MaskReader) -> Plan:
    """The plan with ``same``: what has to be equal in two rows up to a token, for that token to be one in both.

    Whatever is computed of a token is computed from what enters there, and by attention from tokens in front of it.

    Raises:
        Refused: that is not known.
    """
    operators = reader.operators
    if plan.domain.batch == 1:
        raise Refused("a batch has one row")
    if any(node.op == "placeholder" for node in plan.begun):
        raise Refused("the graph is given embeddings, of which each row has gradients of its own")
    for value in plan.facts:
        if operators.is_tensor(value) and (dtype := operators.dtype(value)).is_floating_point and dtype.itemsize == 1:
            raise Refused("gradients of each row are rounded to one byte", value.node)
    for node, attention in plan.attentions.items():
        _require_prefix(attention, plan, node)
    same = tuple(dict.fromkeys(_sources(plan, operators)))
    needed = {each.value.node for each in same}
    earlier = []
    for node in reversed(operators.numbering.root.graph.nodes):
        if node < plan.domain.start:
            break
        if node in needed:
            _require_movable(node, plan, operators)
            needed |= set(node.all_input_nodes)
            earlier.append(node)
    start = plan.domain.start
    while start in earlier:
        start = start.next
    return replace(plan, domain=replace(plan.domain, start=start), same=same, earlier=tuple(reversed(earlier)))


def _require_movable(node: fx.Node, plan: Plan, operators: Operators) -> None:
    """Raises:
    Refused: in front of all that is computed of tokens it might give something else.
    """
    numbering, start = operators.numbering, plan.domain.start
    effects = numbering.effects.get(node)
    values = [value_of(each) for each in (node, *node.all_input_nodes)]
    memory = set[StorageKey]().union(*map(storages_of, values))
    is_of_whole_numbers = not any(each.is_floating_point() for value in values for each in tensors_in(value))
    if (
        effects is None
        or effects.kind is not Kind.PURE
        or effects.syncs
        or not (is_of_whole_numbers or operators.mode(node) == operators.mode(start))
        or not numbering.is_unwritten_after(memory, next(iter(node.graph.nodes)))
    ):
        raise Refused("what rows are compared by is not there in front of the layers", node)


def _require_prefix(attention: Attention, plan: Plan, node: fx.Node) -> None:
    site, seen = attention.site, attention.visibility
    if not seen.is_causal:
        raise Refused("an attention sees what is behind a token", node)
    if seen.documents or set(seen.keys) != set(plan.domain.keys):
        raise Refused("an attention sees other tokens in each row", node)
    is_of_rows = site.sinks is not None and value_of(site.sinks).dim() > 1
    if site.bias is not None or site.factors is not None or is_of_rows:
        raise Refused("the scores of an attention are changed by numbers that each row may have of its own", node)


def _sources(plan: Plan, operators: Operators) -> Iterator[Entering]:
    """What enters from outside and differs by row, as values of the graph itself."""
    steps = [step for each in plan.steps.values() for _, step in each if isinstance(step, Step)]
    for each in (leaf for step in steps for leaf in leaves(list(step.arguments.values()))):
        if not isinstance(each, Entering) or not _differs_by_row(each, operators):
            continue
        value = each.value
        while (outer := operators.passed(value)) is not None:
            value = outer
        if operators.node_of(value) is None or value.node.graph is not operators.numbering.root.graph:
            raise Refused("what enters the tokens is computed in a body", value.node)
        if value_of(value.node).requires_grad:
            raise Refused("what enters the tokens has gradients of its own in each row", value.node)
        yield replace(each, value=value)


def _differs_by_row(each: Entering, operators: Operators) -> bool:
    shape = operators.shape(each.value)
    dims = each.tokens.dims[len(each.tokens.dims) - len(shape) :]
    return any(size != 1 and any(isinstance(part, Rows) for part in dim) for size, dim in zip(shape, dims, strict=True))
