"""Which attentions of a graph need no mask, and what takes their place."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from glue_compiler.fx.index_expressions import IndexReader
from glue_compiler.fx.index_views import shape_of
from glue_compiler.fx.value_numbering import Numbering
from glue_compiler.fx.values import source_line, value_of
from glue_compiler.graph_pass import Skip
from glue_compiler.ops.attention_choice import AttentionCall, Kernel, choose, unsupported
from glue_compiler.options import Compiler
from glue_compiler.passes.specialize_attention.attention_calls import AttentionSite, attention_sites
from glue_compiler.passes.specialize_attention.masks import UnknownMask, Visibility, classify_mask

Form = Literal["unmasked", "causal", "packed"]
"""``unmasked``: sdpa without a mask. ``causal``: sdpa with ``is_causal``. ``packed``: within documents or a window."""


@dataclass(frozen=True)
class Replacement:
    """``site`` computes what ``form`` computes without a mask. ``kernel`` serves ``"packed"``."""

    site: AttentionSite
    visibility: Visibility
    form: Form
    kernel: Kernel | None = None


@dataclass
class Plan:
    replacements: list[Replacement] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


def plan_attention(numbering: Numbering, reader: IndexReader, compiler: Compiler, *, assume_sorted: bool) -> Plan:
    """Plan for a graph and the bodies in it. Reads only."""
    plan = Plan()
    for scope in numbering.scopes:
        for found in attention_sites(scope, reader):
            if not isinstance(found, AttentionSite):
                plan.skips.append(_skip(*found))
                continue
            try:
                plan.replacements.append(_replacement(found, reader, compiler, assume_sorted))
            except UnknownMask as reason:
                plan.skips.append(_skip(found.output, str(reason)))
    return plan


def _replacement(site: AttentionSite, reader: IndexReader, compiler: Compiler, assume_sorted: bool) -> Replacement:
    visibility = Visibility()
    batch, _, length, _ = shape_of(site.query)
    if site.mask is not None:
        visibility = classify_mask(site.mask, batch, length, reader, assume_sorted=assume_sorted)
    if isinstance(length, int) and visibility.window >= length:
        visibility = dataclasses.replace(visibility, window=-1)
    if not visibility.documents and visibility.window < 0:
        return Replacement(site, visibility, "causal" if visibility.is_causal else "unmasked")
    query, key, value = (value_of(node) for node in (site.query, site.grouped_key, site.grouped_value))
    # On record is the dtype that autocast has made of the operands.
    dtype: torch.dtype = value_of(site.output).dtype
    call = dataclasses.replace(AttentionCall.of(query, key, value, site.dropout), dtype=dtype)
    kernel = choose(call, compiler)
    if kernel is None:
        raise UnknownMask(f"the mask is {visibility.name}, but {unsupported(call, compiler)}")
    return Replacement(site, visibility, "packed", kernel)


def _skip(node: fx.Node, reason: str) -> Skip:
    return Skip(reason, node.name, source_line(node))
