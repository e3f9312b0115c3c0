"""Which attentions of a graph need no mask, or only block lists of it, and what takes their place."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from glue_compiler.compat.attention import has_sdpa_backward
from glue_compiler.fx.gradients import Gradients
from glue_compiler.fx.values import expression, value_of, values_of
from glue_compiler.ops.attention_choice import AttentionCall, Kernel, choose, unsupported
from glue_compiler.ops.attention_costs import gradient_pays, lists_pay, pays
from glue_compiler.options import Compiler, Kernels
from glue_compiler.passes.specialize_attention.attention_calls import attention_sites
from glue_compiler.passes.specialize_attention.attention_parts import AttentionSite
from glue_compiler.passes.specialize_attention.candidates import products_with_softmax
from glue_compiler.passes.specialize_attention.listed_masks import ListedMask, listed_mask
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader
from glue_compiler.passes.specialize_attention.masks import UnknownMask, Visibility, classify_mask
from glue_compiler.passes.specialize_attention.memory_layouts import layout_of
from glue_compiler.passes.specialize_attention.metadata_places import MetadataPlace, metadata_place
from glue_compiler.pipeline.results import Skip

Form = Literal["unmasked", "causal", "packed", "listed"]
"""``unmasked``: sdpa without a mask. ``causal``: sdpa with ``is_causal``. ``packed``: within documents, a
window, without padding, or with sinks. ``listed``: over the blocks in which the mask shows a key, by its values."""


@dataclass(frozen=True)
class Replacement:
    """``site`` computes what ``form`` computes.

    Attributes:
        visibility: what the mask is proved to show; None of ``"listed"``.
        kernel: serves ``call``, of ``"packed"`` and ``"listed"``.
        call: all of its heads are of the larger size where values have another one than keys.
        metadata: where that of ``"packed"`` is computed.
        mask: of ``"listed"``, which was not specialised for the reason ``unknown``.
    """

    site: AttentionSite
    visibility: Visibility | None
    form: Form
    kernel: Kernel | None = None
    call: AttentionCall | None = None
    metadata: MetadataPlace | None = None
    mask: ListedMask | None = None
    unknown: str = ""


@dataclass
class AttentionPlan:
    replacements: list[Replacement] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """What is known beside the graph: the compiler that gets it, the kernels that may be taken, and promises."""

    compiler: Compiler
    kernels: Kernels = "all"
    assume_sorted: bool = False


def plan_attention(reader: MaskReader, settings: Settings) -> AttentionPlan:
    """Plan for a graph and the bodies in it. Reads only."""
    plan = AttentionPlan()
    seen: dict[Any, Visibility | UnknownMask] = {}
    numbering = reader.operators.numbering
    candidates = products_with_softmax(reader.operators)
    for scope in numbering.scopes:
        for found in attention_sites(scope, reader, candidates):
            if not isinstance(found, AttentionSite):
                plan.skips.append(Skip.at(*found))
                continue
            try:
                plan.replacements.append(_planned(found, reader, settings, seen))
            except UnknownMask as reason:
                plan.skips.append(Skip.at(found.output, str(reason)))
    _leave_what_does_not_pay(plan)
    # In order of execution, so that what the first attention needs is there for the others.
    plan.replacements.sort(key=lambda replacement: numbering.starts[replacement.site.output])
    return plan


def _planned(
    site: AttentionSite, reader: MaskReader, settings: Settings, seen: dict[Any, Visibility | UnknownMask]
) -> Replacement:
    if layout_of(value_of(site.output)) is None:
        raise UnknownMask("the result is laid out in memory in a way of its own")
    heads = [value_of(node).shape[1] for node in (site.query, site.grouped_key)]
    if site.is_grouped and not all(isinstance(number, int) for number in heads):
        raise UnknownMask(
            "how many query heads share a key head is not known when the graph is compiled; "
            "torch._dynamo.mark_static makes it known"
        )
    try:
        return _replacement(site, _visibility(site, reader, settings.assume_sorted, seen), reader, settings)
    except UnknownMask as unknown:
        if site.mask is None:
            raise
        try:
            mask = listed_mask(site, reader)
            call, kernel = _kernel(site, settings, hides_keys=True)
        except UnknownMask as reason:
            raise UnknownMask(f"{unknown}; and no block lists are made of it, because {reason}") from None
        return Replacement(site, None, "listed", kernel, call, mask=mask, unknown=str(unknown))


def _visibility(
    site: AttentionSite, reader: MaskReader, assume_sorted: bool, seen: dict[Any, Visibility | UnknownMask]
) -> Visibility:
    """The mask's meaning; layers share masks, so each is read once."""
    if site.mask is None:
        return Visibility()
    if not site.is_square:
        raise UnknownMask("there are not provably as many keys as queries (a cache of earlier keys?)")
    gradients = Gradients(site.output, reader.operators)
    if any(gradients.reach(each.value) for each in site.mask.parts):
        raise UnknownMask("the mask has a gradient")
    batch, _, length, _ = map(expression, value_of(site.query).shape)
    masks = tuple((reader.operators.number(each.value), each.role, each.factor) for each in site.mask.parts)
    key = (masks, batch, length)
    if key not in seen:
        try:
            seen[key] = classify_mask(site.mask, batch, length, reader, assume_sorted=assume_sorted)
        except UnknownMask as reason:
            seen[key] = reason
    found = seen[key]
    if isinstance(found, UnknownMask):
        raise found
    return found


def _replacement(site: AttentionSite, visibility: Visibility, reader: MaskReader, settings: Settings) -> Replacement:
    if changes := _changes(site):
        raise UnknownMask(f"the mask is {visibility.name}, but {changes[0]}, which takes block lists of a mask")
    if visibility.keys and (site.inside or site.mask is None or site.mask.role != "shows"):
        raise UnknownMask(
            f"the mask is {visibility.name}, and which keys a query that sees none of them gets instead depends on the "
            "scores; a boolean mask of scaled_dot_product_attention gives zeros, and would be specialised"
        )
    # sdpa's kernels keep the logsumexp, which sinks need, to themselves.
    if not visibility.documents and not visibility.keys and visibility.window < 0 and site.sinks is None:
        if site.inside and settings.compiler == "inductor" and not has_sdpa_backward(value_of(site.output)):
            raise UnknownMask(
                f"the mask is {visibility.name}, but Inductor of this torch fails on sdpa's backward in fp64"
            )
        return Replacement(site, visibility, "causal" if visibility.is_causal else "unmasked")
    if not site.is_square:
        raise UnknownMask("it has attention sinks, and not provably as many keys as queries")
    place = metadata_place(site, visibility, reader)
    try:
        call, kernel = _kernel(site, settings, hides_keys=bool(visibility.keys))
    except UnknownMask as reason:
        raise UnknownMask(f"the mask is {visibility.name}, but {reason}") from None
    return Replacement(site, visibility, "packed", kernel, call, place)


def _changes(site: AttentionSite) -> list[str]:
    """What happens to the scores beside a scale and a mask."""
    changes = {
        "its scores are capped": site.softcap,
        "numbers are added to its scores": site.bias,
        "its scores are multiplied by a tensor": site.factors,
    }
    return [change for change, by in changes.items() if by is not None]


def _kernel(site: AttentionSite, settings: Settings, *, hides_keys: bool) -> tuple[AttentionCall, Kernel]:
    """The kernel for documents, for single keys that are hidden, or for a mask that is read.

    Raises:
        UnknownMask: there is none.
    """
    query, key, value = values_of((site.query, site.grouped_key, site.grouped_value))
    sizes = expression(query.shape[3]), expression(value.shape[3])
    if sizes[0] != sizes[1] and not all(isinstance(size, int) for size in sizes):
        # Symbols must not be compared: that is a guard, and theirs may have no source.
        raise UnknownMask("keys and values are not proved to be of one size")
    # On record is the dtype that autocast has made of the operands.
    dtype: torch.dtype = value_of(site.output).dtype
    call = AttentionCall.of(query, key, value, site.dropout)
    # Kernels take one size of heads: what is smaller is padded with zeros, which change neither scores nor results.
    size = max(*sizes) if sizes[0] != sizes[1] else call.head_size
    call = dataclasses.replace(
        call, dtype=dtype, hides_keys=hides_keys, kernels=settings.kernels, head_size=size, value_size=size
    )
    kernel = choose(call, settings.compiler)
    if kernel is None:
        raise UnknownMask(str(unsupported(call, settings.compiler)))
    return call, kernel


def _leave_what_does_not_pay(plan: AttentionPlan) -> None:
    """Turn replacements into skips where a batch's metadata takes longer than the layers that share it save."""
    layers = Counter(
        (each.visibility, each.call.length) for each in plan.replacements if each.visibility and each.call is not None
    )
    for each in tuple(plan.replacements):
        if each.call is None:
            continue
        capability, length = each.call.capability, each.call.length
        has_gradient = each.mask is not None and each.mask.has_gradient
        if has_gradient and not gradient_pays(capability, is_written_out=bool(each.site.inside)):
            reason = (
                f"{each.unknown}; and what is added to the scores has a gradient, which softmax written out gives it "
                "in less time than a kernel does; scaled_dot_product_attention would be specialised"
            )
        elif each.visibility is None:
            if lists_pay(capability, length):
                continue
            reason = (
                f"{each.unknown}; and for {length} queries it costs less time than block lists of it; more of them "
                "would be specialised"
            )
        else:
            number = layers[each.visibility, length]
            if pays(capability, length, number):
                continue
            reason = (
                f"the mask is {each.visibility.name}, and for {number} layers of {length} tokens it costs "
                "less time than block lists; longer rows would be specialised"
            )
        plan.replacements.remove(each)
        plan.skips.append(Skip.at(each.site.output, reason))
