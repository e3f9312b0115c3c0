"""The padding mask under which all attentions of a graph attend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import fx

from glue_compiler.fx.flow import CONVERSIONS, Refused
from glue_compiler.fx.index_expressions import Unreadable
from glue_compiler.fx.index_numbers import as_boolean
from glue_compiler.fx.index_views import NotAView
from glue_compiler.fx.operators import Value
from glue_compiler.fx.values import expression, inputs_of, value_of, values_of
from glue_compiler.ops.attention_choice import AttentionCall, Kernel, choose
from glue_compiler.ops.known_masks import KNOWN, PADDING, SEEN
from glue_compiler.passes.drop_padding.token_facts import Rows, Span, Tokens, is_token
from glue_compiler.passes.specialize_attention.analysis import Settings
from glue_compiler.passes.specialize_attention.attention_calls import attention_sites
from glue_compiler.passes.specialize_attention.attention_parts import AttentionSite
from glue_compiler.passes.specialize_attention.candidates import products_with_softmax
from glue_compiler.passes.specialize_attention.documents import BATCH, KEY
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader
from glue_compiler.passes.specialize_attention.masks import UnknownMask, Visibility, classify_mask
from glue_compiler.passes.specialize_attention.metadata_places import LeafPlace, MetadataPlace, metadata_place


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
        source: the input that is the mask with this padding, or for whose mask's padding it has zeros, if there is one.
        given: inputs that have zeros for this padding, where another graph has computed the tokens without it.
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
    source: fx.Node | None = None
    given: tuple[fx.Node, ...] = ()

    @property
    def is_given(self) -> bool:
        """Has another graph computed the tokens without padding?"""
        return bool(self.given)

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
        reader.asked.update(dict.fromkeys(_may_be_given(reader)))
        for given in tokens_given(reader).values():
            return domain_given(given, reader, found, unknown)
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
    device = value_of(first.site.query).device
    return Domain(batch, length, keys, place, start, device, found, unknown, _mask_of(keys, place))


def tokens_given(reader: MaskReader) -> dict[int, tuple[fx.Node, ...]]:
    """Inputs that are zeros for tokens which a mask hides, by their padding."""
    found: dict[int, tuple[fx.Node, ...]] = {}
    for node in _may_be_given(reader):
        if node.meta[SEEN] is not None:
            found[node.meta[PADDING]] = (*found.get(node.meta[PADDING], ()), node)
    return found


def _may_be_given(reader: MaskReader) -> list[fx.Node]:
    inputs = inputs_of(reader.operators.numbering.root.graph)
    return [node for node in inputs if SEEN in node.meta and KNOWN not in node.meta]


def domain_given(
    given: tuple[fx.Node, ...],
    reader: MaskReader,
    attentions: Mapping[fx.Node, Attention],
    unknown: Mapping[fx.Node, str],
) -> Domain:
    """Of tokens that another graph has computed without padding."""
    tokens = given[0]
    seen, root = tokens.meta[SEEN], reader.operators.numbering.root
    batch, length = map(expression, value_of(seen).shape)
    condition = as_boolean(reader.read(Value(seen), (sympy.Integer(0) if batch == 1 else BATCH, KEY)))
    leaves = {leaf.func.__name__: LeafPlace(root, seen) for leaf in condition.atoms(AppliedUndef)}
    sizes = [_size_node(size, root.graph) for size in (batch, length)]
    if None in sizes:
        raise Refused("a size of the tokens is no input of the graph", tokens)
    start = next(node for node in root.graph.nodes if node.op != "placeholder")
    place = MetadataPlace(root, start, leaves, *sizes)
    return Domain(batch, length, (condition,), place, start, value_of(seen).device, attentions, unknown, tokens, given)


def _size_node(size: Any, graph: fx.Graph) -> Any:
    if isinstance(size, int):
        return size
    found = (node for node in inputs_of(graph) if isinstance(value_of(node), torch.SymInt))
    return next((node for node in found if expression(value_of(node)) == size), None)


def _mask_of(keys: tuple[Any, ...], place: MetadataPlace) -> fx.Node | None:
    """The input that is a mask whose padding, and nothing else, ``keys`` are."""
    is_one = len(keys) == len(place.leaves) == 1 and isinstance(keys[0], sympy.Ne)
    seen = next(iter(place.leaves.values())).node if is_one else None
    return next((node for node in inputs_of(place.scope.graph) if seen and node.meta.get(SEEN) is seen), None)


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
        AttentionCall.of(query, key, value, site.dropout),
        dtype=value_of(site.output).dtype,
        length=None,
        rows=None,
        kernels=settings.kernels,
    )
    kernel = choose(call, settings.compiler)
    return None if kernel == "flex" else kernel


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
