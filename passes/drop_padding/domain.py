"""The padding mask under which all attentions of a graph attend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from torch import fx

from glue_compiler.fx.flow import CONVERSIONS, Refused
from glue_compiler.fx.index_expressions import Unreadable
from glue_compiler.fx.index_numbers import as_boolean
from glue_compiler.fx.index_views import NotAView
from glue_compiler.fx.operators import Value
from glue_compiler.fx.values import expression, value_of, values_of
from glue_compiler.ops.attention_choice import AttentionCall, Kernel, choose
from glue_compiler.passes.drop_padding.token_facts import Rows, Span, Tokens, is_token
from glue_compiler.passes.specialize_attention.analysis import Settings
from glue_compiler.passes.specialize_attention.attention_calls import attention_sites
from glue_compiler.passes.specialize_attention.attention_parts import AttentionSite
from glue_compiler.passes.specialize_attention.candidates import products_with_softmax
from glue_compiler.passes.specialize_attention.documents import BATCH, KEY
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader
from glue_compiler.passes.specialize_attention.masks import UnknownMask, Visibility, classify_mask
from glue_compiler.passes.specialize_attention.metadata_places import MetadataPlace, metadata_place


@dataclass(frozen=True)
class Attention:
    """``kernel`` computes it for the tokens that count, as a document for each row; None: the tokens are put back."""

    site: AttentionSite
    visibility: Visibility
    kernel: Kernel | None = None


@dataclass
class Domain:
    """The tokens of a batch ``[B, T]``, and the condition ``seen``, of ``BATCH`` and ``KEY``, for those that count.

    Attributes:
        attentions: by their results; of other attentions in ``unknown`` why it is not known what they see.
        place: where the condition can be computed.
        start: the node before which everything that it is computed from is there.
    """

    batch: Any
    length: Any
    keys: tuple[Any, ...]
    place: MetadataPlace
    start: fx.Node
    device: torch.device
    attentions: Mapping[fx.Node, Attention]
    unknown: Mapping[fx.Node, str] = field(default_factory=dict)

    @property
    def whole(self) -> Tokens:
        rows = () if self.batch == 1 else (Rows(self.batch),)
        return Tokens((rows, (Span(0, self.length),)))

    def hides_padding(self, attention: Attention) -> bool:
        return set(self.keys) <= set(attention.visibility.keys)

    def shows(self, value: Value, tokens: Tokens, reader: MaskReader) -> Literal["seen", "hidden"] | None:
        """Is ``value`` nonzero exactly where a token is seen, or where one is hidden?"""
        index = []
        for place, dim in enumerate(tokens.dims):
            match dim:
                case ():
                    index.append(sympy.Integer(0))
                case (Rows(),):
                    index.append(BATCH)
                case (Span(0, size),) if size == self.length:
                    index.append(KEY)
                case _ if any(map(is_token, dim)):
                    return None
                case _:
                    index.append(sympy.Symbol(f"place{place}", integer=True, nonnegative=True))
        value = _before_floating(value, reader)
        try:
            found = as_boolean(reader.read(value, tuple(index[len(index) - len(reader.shape(value)) :])))
        except (Unreadable, NotAView):
            return None
        seen = sympy.And(*self.keys)
        return "seen" if found == seen else "hidden" if found == sympy.Not(seen) else None


def _before_floating(value: Value, reader: MaskReader) -> Value:
    """The integers or booleans that were converted to floating numbers, which are zero where those are."""
    call = reader.operators.does(value, *CONVERSIONS)
    if call is None or not reader.dtype(value).is_floating_point:
        return value
    before = call.arguments["self"]
    is_whole = reader.operators.is_tensor(before) and not reader.dtype(before).is_floating_point
    return before if is_whole and not reader.dtype(before).is_complex else value


def find_domain(reader: MaskReader, settings: Settings) -> Domain:
    """What the attentions of a graph say of padding.

    Raises:
        Refused: there is no attention under a padding mask, or under several, or the mask cannot be computed in front
            of the graph.
    """
    numbering = reader.operators.numbering
    found: dict[fx.Node, Attention] = {}
    unknown: dict[fx.Node, str] = {}
    candidates = products_with_softmax(reader.operators)
    for scope in numbering.scopes:
        for site in attention_sites(scope, reader, candidates):
            if not isinstance(site, AttentionSite):
                unknown[site[0]] = site[1]
                continue
            try:
                visibility = _visibility(site, reader, settings.assume_sorted)
                found[site.output] = Attention(site, visibility, _kernel(site, visibility, settings))
            except UnknownMask as reason:
                unknown[site.output] = str(reason)
    padded = [each for each in found.values() if each.visibility.keys]
    if not padded:
        node, why = next(iter(unknown.items()), (None, "no attention attends under a padding mask"))
        raise Refused(why, node)
    first = padded[0]
    common = set(first.visibility.keys).intersection(*(each.visibility.keys for each in padded))
    sizes = {_sizes(each.site) for each in padded}
    if not common or len(sizes) > 1:
        raise Refused("its attentions attend under different padding masks", padded[-1].site.output)
    keys = tuple(key for key in first.visibility.keys if key in common)
    try:
        place = metadata_place(first.site, Visibility(keys=keys), reader)
    except UnknownMask as reason:
        raise Refused(str(reason), first.site.output) from None
    (batch, length) = sizes.pop()
    if place.scope is not numbering.root or None in (place.batch, place.length):
        raise Refused("what the padding mask is made from is not at hand in front of the layers", first.site.output)
    if length == 1 or batch == 0:
        raise Refused("rows of one token", first.site.output)
    start = _start(place, numbering.root.graph)
    return Domain(batch, length, keys, place, start, value_of(first.site.query).device, found, unknown)


def _visibility(site: AttentionSite, reader: MaskReader, assume_sorted: bool) -> Visibility:
    if site.mask is None:
        return Visibility()
    if not site.is_square:
        raise UnknownMask("there are not provably as many keys as queries (a cache of earlier keys?)")
    batch, length = _sizes(site)
    return classify_mask(site.mask, batch, length, reader, assume_sorted=assume_sorted)


def _kernel(site: AttentionSite, visibility: Visibility, settings: Settings) -> Kernel | None:
    is_more = site.softcap or site.bias is not None or site.factors is not None or site.sinks is not None
    if is_more or site.is_key_transposed or not site.is_square:
        return None
    if len(visibility.keys) != 1 or visibility.documents or visibility.window >= 0:
        return None  # a window counts hidden tokens too
    query, key, value = values_of((site.query, site.grouped_key, site.grouped_value))
    sizes = (query.shape[3], value.shape[3])
    if not all(isinstance(size, int) for size in (*sizes, query.shape[1], key.shape[1])):
        return None
    call = dataclasses.replace(
        AttentionCall.of(query, key, value, site.dropout), dtype=value_of(site.output).dtype, length=None, rows=None
    )
    kernel = choose(call, settings.compiler)
    return kernel if kernel == "varlen" else None


def _sizes(site: AttentionSite) -> tuple[Any, Any]:
    batch, _, length, _ = map(expression, value_of(site.query).shape)
    return batch, length


def _start(place: MetadataPlace, graph: fx.Graph) -> fx.Node:
    """The first node behind the graph's inputs and what the condition is computed from."""
    needed = {each.node for each in place.leaves.values()}
    needed |= {size for size in (place.batch, place.length) if isinstance(size, fx.Node)}
    nodes = list(graph.nodes)
    last = max((i for i, node in enumerate(nodes) if node in needed or node.op == "placeholder"), default=-1)
    return nodes[last + 1]
