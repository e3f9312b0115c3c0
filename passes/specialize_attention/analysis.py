"""Which attentions of a graph need no mask, and what takes their place."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from glue_compiler.compat.attention import has_sdpa_backward
from glue_compiler.fx.index_expressions import IndexReader
from glue_compiler.fx.value_numbering import Numbering
from glue_compiler.fx.values import expression, source_line, value_of
from glue_compiler.graph_pass import Skip
from glue_compiler.ops.attention_choice import AttentionCall, Kernel, choose, unsupported
from glue_compiler.ops.attention_costs import pays
from glue_compiler.options import Compiler
from glue_compiler.passes.specialize_attention.attention_calls import AttentionSite, attention_sites
from glue_compiler.passes.specialize_attention.masks import UnknownMask, Visibility, classify_mask
from glue_compiler.passes.specialize_attention.memory_layouts import layout_of
from glue_compiler.passes.specialize_attention.metadata_places import MetadataPlace, metadata_place

Form = Literal["unmasked", "causal", "packed"]
"""``unmasked``: sdpa without a mask. ``causal``: sdpa with ``is_causal``. ``packed``: within documents, a
window, or without padding."""


@dataclass(frozen=True)
class Replacement:
    """``site`` computes what ``form`` computes without a mask. ``kernel`` serves ``call``, of ``"packed"``; its
    metadata is computed at ``metadata``."""

    site: AttentionSite
    visibility: Visibility
    form: Form
    kernel: Kernel | None = None
    call: AttentionCall | None = None
    metadata: MetadataPlace | None = None


@dataclass
class Plan:
    replacements: list[Replacement] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


def plan_attention(numbering: Numbering, reader: IndexReader, compiler: Compiler, *, assume_sorted: bool) -> Plan:
    """Plan for a graph and the bodies in it. Reads only."""
    plan = Plan()
    seen: dict[Any, Visibility | UnknownMask] = {}
    for scope in numbering.scopes:
        for found in attention_sites(scope, reader):
            if not isinstance(found, AttentionSite):
                plan.skips.append(_skip(*found))
                continue
            try:
                visibility = _visibility(found, reader, assume_sorted, seen)
                plan.replacements.append(_replacement(found, visibility, reader, compiler))
            except UnknownMask as reason:
                plan.skips.append(_skip(found.output, str(reason)))
    _leave_what_does_not_pay(plan)
    # In order of execution, so that what the first attention needs is there for the others.
    time = {o.node: o.time for occurrences in numbering.occurrences.values() for o in occurrences}
    plan.replacements.sort(key=lambda replacement: time[replacement.site.output])
    return plan


def _visibility(
    site: AttentionSite, reader: IndexReader, assume_sorted: bool, seen: dict[Any, Visibility | UnknownMask]
) -> Visibility:
    """The mask's meaning; layers share masks, so each is read once."""
    if site.mask is None:
        return Visibility()
    batch, _, length, _ = map(expression, value_of(site.query).shape)
    key = (reader.operators.number(site.mask.value), site.mask.role, batch, length)
    if key not in seen:
        try:
            seen[key] = classify_mask(site.mask, batch, length, reader, assume_sorted=assume_sorted)
        except UnknownMask as reason:
            seen[key] = reason
    found = seen[key]
    if isinstance(found, UnknownMask):
        raise found
    return found


def _replacement(site: AttentionSite, visibility: Visibility, reader: IndexReader, compiler: Compiler) -> Replacement:
    if visibility.keys and (site.inside or site.mask is None or site.mask.role != "shows"):
        raise UnknownMask(
            f"the mask is {visibility.name}, and which keys a query that sees none of them gets instead depends on the "
            "scores; a boolean mask of scaled_dot_product_attention gives zeros, and would be specialised"
        )
    if layout_of(value_of(site.output)) is None:
        raise UnknownMask(f"the mask is {visibility.name}, but the result is laid out in memory in a way of its own")
    heads = [value_of(node).shape[1] for node in (site.query, site.grouped_key)]
    if site.is_grouped and not all(isinstance(number, int) for number in heads):
        raise UnknownMask(
            f"the mask is {visibility.name}, but how many query heads share a key head is not known when the graph is "
            "compiled; torch._dynamo.mark_static makes it known"
        )
    if not visibility.documents and not visibility.keys and visibility.window < 0:
        if site.inside and compiler == "inductor" and not has_sdpa_backward(value_of(site.output)):
            raise UnknownMask(
                f"the mask is {visibility.name}, but Inductor of this torch fails on sdpa's backward in fp64"
            )
        return Replacement(site, visibility, "causal" if visibility.is_causal else "unmasked")
    query, key, value = (value_of(node) for node in (site.query, site.grouped_key, site.grouped_value))
    sizes = expression(query.shape[3]), expression(value.shape[3])
    if sizes[0] != sizes[1] and not all(isinstance(size, int) for size in sizes):
        # Symbols must not be compared: that is a guard, and theirs may have no source.
        raise UnknownMask(f"the mask is {visibility.name}, but keys and values are not proved to be of one size")
    # On record is the dtype that autocast has made of the operands.
    dtype: torch.dtype = value_of(site.output).dtype
    call = AttentionCall.of(query, key, value, site.dropout)
    call = dataclasses.replace(call, dtype=dtype, hides_keys=bool(visibility.keys))
    kernel = choose(call, compiler)
    if kernel is None:
        raise UnknownMask(f"the mask is {visibility.name}, but {unsupported(call, compiler)}")
    place = metadata_place(site, visibility, reader)
    return Replacement(site, visibility, "packed", kernel, call, place)


def _leave_what_does_not_pay(plan: Plan) -> None:
    """Turn replacements into skips where a batch's metadata takes longer than the layers that share it save."""
    packed = [each for each in plan.replacements if each.call is not None]
    layers = Counter((each.visibility, each.call.length) for each in packed if each.call is not None)
    for each in packed:
        assert each.call is not None
        number = layers[each.visibility, each.call.length]
        if not pays(each.call.capability, each.call.length, number):
            plan.replacements.remove(each)
            reason = (
                f"the mask is {each.visibility.name}, and for {number} layers of {each.call.length} tokens it costs "
                "less time than block lists; longer rows would be specialised"
            )
            plan.skips.append(_skip(each.site.output, reason))


def _skip(node: fx.Node, reason: str) -> Skip:
    return Skip(reason, node.name, source_line(node))
