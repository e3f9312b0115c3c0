"""Masks that a graph returns, for other graphs to attend with."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx

from glue_compiler.fx.values import expressions, storages_of, value_of
from glue_compiler.ops.known_masks import MaskKind, may_be_mask
from glue_compiler.passes.specialize_attention.attention_parts import Mask
from glue_compiler.passes.specialize_attention.mask_reader import MaskReader
from glue_compiler.passes.specialize_attention.masks import UnknownMask, classify_mask, hidden_number
from glue_compiler.pipeline.results import Skip


def returned_masks(reader: MaskReader, *, assume_sorted: bool) -> tuple[dict[int, tuple[MaskKind, int]], list[Skip]]:
    """What masks that the graph returns show, by their positions; and why it is not known of the others.

    With a number that is equal for those that hide the same padding.
    """
    kinds, skips = dict[int, tuple[MaskKind, int]](), list[Skip]()
    paddings = dict[frozenset[Any], int]()
    graph = reader.operators.numbering.root.graph
    output = graph.output_node()
    returned: Any = output.args[0]
    around = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")} | set(output.all_input_nodes)
    sharing = Counter(storage for node in around for storage in storages_of(value_of(node)))
    for position, node in enumerate(returned if isinstance(returned, tuple | list) else ()):
        if isinstance(node, fx.Node) and node.op != "placeholder" and may_be_mask(value_of(node)):
            try:
                if any(sharing[storage] > 1 for storage in storages_of(value_of(node))):
                    # Compilers return views with version counters of their own: a write to one shows in no other.
                    raise UnknownMask("an input or another result lies in its memory")
                kind, keys = _kind(node, output, reader, assume_sorted)
                kinds[position] = kind, paddings.setdefault(keys, len(paddings))
            except UnknownMask as reason:
                skips.append(Skip.at(node, f"the graph returns this mask, and others have to read it: {reason}"))
    return kinds, skips


def _kind(node: fx.Node, output: fx.Node, reader: MaskReader, assume_sorted: bool) -> tuple[MaskKind, frozenset[Any]]:
    """And the conditions on keys that it hides padding by."""
    value = reader.operators.read(node, output)
    shape = expressions(value_of(node).shape)
    batch = shape[0] if len(shape) == 4 else 1
    is_added = value_of(node).dtype.is_floating_point
    mask = Mask(value, "added" if is_added else "shows", None)
    found = classify_mask(mask, batch, shape[-1], reader, assume_sorted=assume_sorted)
    if found.keys and (found.documents or len(shape) != 4):
        raise UnknownMask(f"it is {found.name}, and its values do not tell padding from where a document begins")
    hidden = hidden_number(mask, batch, reader) if is_added else None
    kind = MaskKind(bool(found.documents), found.is_causal, found.window, hidden, bool(found.keys))
    return kind, frozenset(found.keys)
