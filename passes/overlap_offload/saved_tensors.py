"""Finds the saved tensors that may wait for backward on the host. Changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from glue_compiler.compat import checkpoint_tags, device_copies, offload_policies
from glue_compiler.errors import GlueInvariantError, GlueOffloadError
from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import (
    expression,
    inputs_of,
    is_in_order,
    is_plain,
    makes_tensor,
    most_bytes,
    source_line,
    storages_of,
    value_of,
)
from glue_compiler.ops.copy_engine import why_no_copies
from glue_compiler.pipeline.results import Skip

Wish = Literal["region", "prefer", "must", "copy"]
"""Why a tensor would move: it is a checkpointed region's input, a selective policy prefers it or insists on it, or the
graph moved it already."""


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor that may move.

    ``saved`` is its node in forward, ``taken`` the placeholder in backward. Places are indices into the graphs' nodes:
    ``last_forward_use`` of the tensor or a view of it, ``first_use`` and ``last_use`` likewise in backward.
    """

    wish: Wish
    saved: fx.Node
    taken: fx.Node
    nbytes: int
    last_forward_use: int
    first_use: int
    last_use: int

    def skip(self, reason: str) -> Skip:
        return Skip.at(self.saved, reason)


@dataclass(frozen=True)
class RegionTensors:
    """The tensors of one region, which move together; ``index`` counts the regions in the order of the forward.

    A region is a checkpointed one, seen from backward: what its recomputation and its backward read. A tensor that
    belongs to none is a region of its own. ``earliest``: where backward first reads what is saved of the region behind
    it, moved or not: to have it back before that would be of no use.
    """

    index: int
    tensors: tuple[SavedTensor, ...]
    earliest: int = 0

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors)

    @property
    def end(self) -> int:
        """The last place in forward that reads one of them."""
        return max(one.last_forward_use for one in self.tensors)

    @property
    def first_use(self) -> int:
        return min(one.first_use for one in self.tensors)

    @property
    def last_use(self) -> int:
        return max(one.last_use for one in self.tensors)

    @property
    def is_required(self) -> bool:
        """Does it move even where copies cannot be hidden?"""
        return any(one.wish in ("must", "copy") for one in self.tensors)


@dataclass(frozen=True)
class _Uses:
    """For each node that makes memory, the places that read it or make a view of it."""

    forward: Mapping[fx.Node, list[int]]
    backward: Mapping[fx.Node, list[int]]


def find_saved_tensors(
    pair: TrainingPair, shape_env: object, *, all_inputs: bool, copied: Iterable[fx.Node] = ()
) -> tuple[list[RegionTensors], list[Skip]]:
    """What may move, by region, in the order of the forward: the last is the one that backward needs first.

    Args:
        all_inputs: the inputs of all checkpointed regions, beside what selective policies name.
        copied: saved tensors that the graph itself moved.

    Raises:
        GlueOffloadError: a tensor that a policy insists on cannot move.
    """
    forward, backward = list(pair.forward.graph.nodes), list(pair.backward.graph.nodes)
    uses = _Uses(_uses_of_memory(forward), _uses_of_memory(backward))
    places = {node: place for place, node in enumerate(forward)}
    placeholders = {node.name: node for node in backward if node.op == "placeholder"}
    kept = kept_by_the_caller(pair)
    copied = set(copied)
    found: dict[object, list[SavedTensor]] = defaultdict(list)
    begins: dict[int, int] = {}
    skips = []
    for saved in pair.saved:
        taken = placeholders[saved.name]
        taken_uses = uses.backward.get(taken, [])
        if not makes_tensor(saved) or not taken_uses:
            continue
        started = regions_started(saved, [backward[place] for place in taken_uses])
        own = checkpoint_tags.region_of(saved)
        group = next(iter(started), saved if own is None else own)
        if isinstance(group, int) and len(started) <= 1:
            begins[group] = min(begins.get(group, len(backward)), *taken_uses)
        wish: Wish | None = "copy" if saved in copied else offload_policies.wish_of(saved)
        # Parameters are read by regions too, and each would be a skip.
        if wish is None and started and all_inputs and not checkpoint_tags.is_graph_input(saved):
            wish = "region"
        if wish is None:
            continue
        reason = why_not(saved, started, pair, kept, [backward[place] for place in taken_uses])
        if reason and wish == "must":
            raise GlueOffloadError(
                f"CheckpointPolicy.MUST_CPU_OFFLOAD asks for '{saved.name}' ({source_line(saved)}) to wait in host "
                f"memory, and {reason}. PREFER_CPU_OFFLOAD would leave it where it is."
            )
        if reason and wish == "copy":
            raise GlueInvariantError(f"'{saved.name}' was copied to the host by the graph, and now {reason}")
        if reason:
            skips.append(Skip.at(saved, reason))
            continue
        found[group].append(
            SavedTensor(
                wish,
                saved,
                taken,
                # Without a bound on a dynamic size it counts as one byte, so that it moves all the same.
                most_bytes(value_of(saved), shape_env) or (0 if value_of(saved).numel() == 0 else 1),
                max((p for p in uses.forward[storage_root(saved)] if forward[p].op != "output"), default=places[saved]),
                min(taken_uses),
                max(taken_uses),
            )
        )
    in_order = sorted(found.items(), key=lambda region: -min(one.first_use for one in region[1]))
    return [
        RegionTensors(index, tuple(tensors), _begin_behind(group, begins))
        for index, (group, tensors) in enumerate(in_order)
    ], skips


def _begin_behind(group: object, begins: Mapping[int, int]) -> int:
    behind = [number for number in begins if isinstance(group, int) and number > group]
    return begins[min(behind)] if behind else 0


def regions_started(saved: fx.Node, readers: Iterable[fx.Node]) -> set[int]:
    """The regions, but its own, whose recomputation reads a value, also through recomputed nodes between regions."""
    found: set[int] = set()
    waiting, seen = list(readers), set()
    while waiting:
        reader = waiting.pop()
        region = checkpoint_tags.region_of(reader)
        if region is not None:
            found.add(region)
        elif checkpoint_tags.is_recomputed(reader) and reader not in seen:
            seen.add(reader)
            waiting += reader.users
    own = checkpoint_tags.region_of(saved)
    return found - {own} if own is not None else found


def why_not(
    saved: fx.Node, started: set[int], pair: TrainingPair, kept: Mapping[int, fx.Node], readers: Iterable[fx.Node]
) -> str | None:
    """Why a saved tensor stays on the device, or None."""
    value = value_of(saved)
    if not is_plain(value):
        return f"a {type(value).__name__} is not copied as a plain tensor"
    if _is_in_flight(storage_root(saved)):
        return "a collective may still be writing it: it is waited for later. A result that is waited for would move"
    if len(started) > 1:
        return f"the recomputation of {len(started)} regions reads it, so it is needed all through backward"
    keys = memory_of(saved)
    for key in keys & set(kept):
        if kept[key].op == "placeholder":
            return f"its memory is that of the graph's input '{kept[key].name}', which the caller keeps"
        return f"its memory is returned to the caller as '{kept[key].name}', so moving a copy would free nothing"
    for other in pair.saved:
        # A copy that torch's own offload made of a CPU tensor is recorded on the memory that it copied.
        if saved not in (other, device_copies.copied_from(other)) and keys & memory_of(other):
            return f"backward also needs '{other.name}', which shares its memory"
    if reason := why_no_copies(value.device):
        return reason
    if not is_in_order(value):
        return "its elements do not lie in the order of its sizes, as those of a copy would; .contiguous() helps"
    if expression(value.storage_offset()) != 0 and any(r.target is torch.ops.aten.as_strided.default for r in readers):
        return "backward reads its memory by absolute offsets, which a copy does not have"
    return None


def _is_in_flight(maker: fx.Node) -> bool:
    """Does it make its result on a stream of its own, which only ``wait_tensor`` waits for?"""
    namespace, _, name = str(maker.target).partition(".")
    return namespace in ("_c10d_functional", "_c10d_functional_autograd") and not name.startswith("wait_tensor")


def kept_by_the_caller(pair: TrainingPair) -> Mapping[int, fx.Node]:
    """By :func:`memory_of`, the inputs and outputs that stay on the device whatever is moved."""
    kept: dict[int, fx.Node] = {}
    inputs = inputs_of(pair.forward.graph)
    for node in (*inputs, *(value for value in pair.outputs if isinstance(value, fx.Node))):
        kept.update(dict.fromkeys(memory_of(node), node))
    return kept


def memory_of(node: fx.Node) -> set[int]:
    """What tells the memory of a tensor: two that share some have one of these in common."""
    return {id(storage_root(node)), *storages_of(value_of(node))}


def _uses_of_memory(nodes: Sequence[fx.Node]) -> Mapping[fx.Node, list[int]]:
    uses: dict[fx.Node, list[int]] = defaultdict(list)
    for place, node in enumerate(nodes):
        for root in {storage_root(operand) for operand in node.all_input_nodes}:
            uses[root].append(place)
    return uses
