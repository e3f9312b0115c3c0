"""Finds the saved inputs of checkpointed regions, and where their copies start and end. Changes nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from glue_compiler.compat import checkpoint_tags
from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import expression, is_plain, keeps_layout, most_bytes, source_line, storages_of, value_of
from glue_compiler.graph_pass import Skip
from glue_compiler.passes.overlap_offload.plan import Region

Step = Literal["start", "wait"]


@dataclass(frozen=True)
class SavedInput:
    """A saved tensor that one region's recomputation starts from.

    ``saved`` is its node in forward, ``taken`` the placeholder in backward. Places are indices into the graphs' nodes:
    ``last_forward_use`` of the tensor or a view of it, ``first_use`` and ``last_use`` likewise in backward.
    """

    region: int
    saved: fx.Node
    taken: fx.Node
    nbytes: int
    last_forward_use: int
    first_use: int
    last_use: int


@dataclass(frozen=True)
class RegionInputs:
    """All saved inputs of one region; ``index`` counts the regions of the forward, in the order in which they end."""

    index: int
    inputs: tuple[SavedInput, ...]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.inputs)

    @property
    def end(self) -> int:
        """The last place in forward that reads one of them."""
        return max(one.last_forward_use for one in self.inputs)

    @property
    def first_use(self) -> int:
        return min(one.first_use for one in self.inputs)

    @property
    def last_use(self) -> int:
        return max(one.last_use for one in self.inputs)

    def as_region(self) -> Region:
        return Region(self.index, self.nbytes, 0.0, 0.0)


@dataclass(frozen=True)
class Move:
    """One tensor's way to the host and back, as places in front of which an operator goes.

    Forward: the copy starts in front of ``offload_start`` and is waited for in front of ``offload_wait``. Backward: the
    reload starts in front of ``reload_start``, and ends in front of ``reload_wait``, the tensor's first use there.
    ``*_after`` is a value that exists at that place anyway and that the operator must follow.
    """

    one: SavedInput
    offload_start: fx.Node
    offload_wait: fx.Node
    offload_after: fx.Node | None
    reload_start: fx.Node
    reload_wait: fx.Node
    start_after: fx.Node | None
    wait_after: fx.Node | None


@dataclass(frozen=True)
class Schedule:
    """``moves``: the tensors of one region together, in the order in which their copies start.

    ``steps``: the starts and waits of the forward, each with an index into ``moves``, in the order in which they go in;
    those with the same place keep it.
    """

    moves: tuple[tuple[Move, ...], ...]
    steps: tuple[tuple[Step, int], ...]
    skips: tuple[Skip, ...]


def find_saved_inputs(pair: TrainingPair, shape_env: object) -> tuple[list[RegionInputs], list[Skip]]:
    """The regions of ``pair`` that have a saved input of their own, in the order of the forward."""
    forward, backward = list(pair.forward.graph.nodes), list(pair.backward.graph.nodes)
    uses, taken_uses = _uses_of_memory(forward), _uses_of_memory(backward)
    placeholders = {node.name: node for node in backward if node.op == "placeholder"}
    kept = _kept_by_the_caller(pair)
    found: dict[int, list[SavedInput]] = defaultdict(list)
    skips = []
    for saved in pair.saved:
        taken = placeholders[saved.name]
        starts = _regions_started(backward[place] for place in taken_uses[taken])
        starts -= {checkpoint_tags.region_of(saved)}
        if not starts or not isinstance(value_of(saved), torch.Tensor) or checkpoint_tags.is_graph_input(saved):
            continue
        reason = _why_not(saved, starts, pair, kept) or _why_no_copy(saved, [backward[p] for p in taken_uses[taken]])
        if reason:
            skips.append(Skip(reason, saved.name, source_line(saved)))
            continue
        (region,) = starts
        places = taken_uses[taken]
        found[region].append(
            SavedInput(
                region,
                saved,
                taken,
                most_bytes(value_of(saved), shape_env) or 0,
                max((p for p in uses[storage_root(saved)] if forward[p].op != "output"), default=forward.index(saved)),
                min(places),
                max(places),
            )
        )
    regions = [RegionInputs(index, tuple(found[region])) for index, region in enumerate(sorted(found))]
    return regions, skips


def schedule_moves(pair: TrainingPair, regions: Sequence[RegionInputs], moved: Iterable[int], buffers: int) -> Schedule:
    """Where the copies of the regions in ``moved`` start and end, so that at most ``buffers`` are alive at any place.

    A region whose reload could not start before its first use is left where it is, and so is one whose first use in
    backward comes before that of a region that ends later in forward.
    """
    forward, backward = list(pair.forward.graph.nodes), list(pair.backward.graph.nodes)
    wanted = set(moved)
    in_backward = list(reversed(regions))
    skips: list[Skip] = []
    reloads: list[tuple[RegionInputs, int]] = []
    for previous, region in itertools.pairwise(in_backward):
        if region.index not in wanted:
            continue
        # The reload starts with the backward of the region before, or when the place of an earlier one is free.
        start = previous.first_use
        if len(reloads) >= buffers:
            start = max(start, reloads[-buffers][0].last_use + 1)
        if start >= region.first_use:
            reason = "backward still needs earlier inputs when it needs this one, so that a copy could not be hidden"
            skips.append(Skip(reason, region.inputs[0].saved.name, source_line(region.inputs[0].saved)))
            continue
        reloads.append((region, start))
    realised, realised_backward = _realised(pair.forward), _realised(pair.backward)
    order = sorted(reloads, key=lambda reload: reload[0].end)
    waits = _offload_waits([region.end for region, _ in order], [region.end for region in regions], len(forward) - 1)
    moves = tuple(
        tuple(
            Move(
                one,
                offload_start=forward[region.end + 1],
                offload_wait=forward[wait],
                offload_after=_latest(forward, wait, realised),
                reload_start=backward[start],
                reload_wait=backward[one.first_use],
                start_after=_latest(backward, start, realised_backward),
                wait_after=_latest(backward, one.first_use, realised_backward),
            )
            for one in region.inputs
        )
        for (region, start), wait in zip(order, waits, strict=True)
    )
    starts = [region.end + 1 for region, _ in order]
    return Schedule(moves, _in_order(starts, waits, buffers), tuple(skips))


def _offload_waits(moved_ends: Sequence[int], ends: Sequence[int], last: int) -> list[int]:
    """Where each copy to the host is waited for: behind the next region, which hides it. ``last``: the forward's end.

    Waiting later would keep its source alive for longer and, as copies run one by one, gain no time in a long run.
    """
    return [min((end + 1 for end in ends if end > moved), default=last) for moved in moved_ends]


def _in_order(starts: Sequence[int], waits: Sequence[int], buffers: int) -> tuple[tuple[Step, int], ...]:
    """Starts, each followed by the waits that are due, so that at most ``buffers`` copies are under way."""
    steps: list[tuple[Step, int]] = []
    under_way: deque[int] = deque()
    for number, start in enumerate(starts):
        while len(under_way) >= buffers:
            steps.append(("wait", under_way.popleft()))
        steps.append(("start", number))
        while under_way and waits[under_way[0]] <= start:
            steps.append(("wait", under_way.popleft()))
        under_way.append(number)
    return (*steps, *(("wait", number) for number in under_way))


def _uses_of_memory(nodes: Sequence[fx.Node]) -> Mapping[fx.Node, list[int]]:
    """For each node that makes memory, the places that read it or make a view of it."""
    uses: dict[fx.Node, list[int]] = defaultdict(list)
    for place, node in enumerate(nodes):
        for root in {storage_root(operand) for operand in node.all_input_nodes}:
            uses[root].append(place)
    return uses


def _regions_started(readers: Iterable[fx.Node]) -> set[int]:
    """The regions whose recomputation reads a value, directly or through recomputed nodes between regions."""
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
    return found


def _kept_by_the_caller(pair: TrainingPair) -> Mapping[int, fx.Node]:
    """Storages, as recorded, and by node id the memory, that stay on the device whatever is moved."""
    kept: dict[int, fx.Node] = {}
    inputs = pair.forward.graph.find_nodes(op="placeholder")
    for node in (*inputs, *(value for value in pair.outputs if isinstance(value, fx.Node))):
        kept.update(dict.fromkeys((id(storage_root(node)), *storages_of(value_of(node))), node))
    return kept


def _why_not(saved: fx.Node, starts: set[int], pair: TrainingPair, kept: Mapping[int, fx.Node]) -> str | None:
    value = value_of(saved)
    if len(starts) > 1:
        return f"the recomputation of {len(starts)} regions reads it, so it is needed all through backward"
    keys = {id(storage_root(saved)), *storages_of(value)}
    for key in keys & set(kept):
        if kept[key].op == "placeholder":
            return f"its memory is that of the graph's input '{kept[key].name}', which the caller keeps"
        return f"its memory is returned to the caller as '{kept[key].name}', so moving a copy would free nothing"
    for other in pair.saved:
        if other is not saved and keys & {id(storage_root(other)), *storages_of(value_of(other))}:
            return f"backward also needs '{other.name}', which shares its memory"
    return None


def _why_no_copy(saved: fx.Node, readers: Iterable[fx.Node]) -> str | None:
    """Why a copy of the tensor could not stand for it in backward."""
    value = value_of(saved)
    if not is_plain(value):
        return f"a {type(value).__name__} is not copied as a plain tensor"
    if value.device.type not in ("cuda", "cpu"):
        return f"copies beside compute are written for CUDA devices, not for '{value.device.type}'"
    if not keeps_layout(value):
        return (
            "its elements do not lie next to each other, and a copy would; .contiguous() in front of the region helps"
        )
    if expression(value.storage_offset()) != 0 and any(r.target is torch.ops.aten.as_strided.default for r in readers):
        return "backward reads its memory by absolute offsets, which a copy does not have"
    return None


def _realised(gm: fx.GraphModule) -> set[fx.Node]:
    """Tensors that exist in memory whatever a compiler fuses: what products and attention read and write.

    An operator that must follow such a value costs nothing; one that must follow a value in the middle of a fused
    kernel would make the kernel write it out.
    """
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if getattr(node.target, "overloadpacket", None) in flop_registry:
            found.add(node)
            found.update(operand for operand in node.all_input_nodes if operand.op == "call_function")
    found.update(node for node in gm.graph.output_node().all_input_nodes if node.op == "call_function")
    return {node for node in found if isinstance(value_of(node), torch.Tensor) and storage_root(node) is node}


def _latest(nodes: Sequence[fx.Node], place: int, realised: set[fx.Node]) -> fx.Node | None:
    """The value in ``realised`` computed last before ``place``: preferably one that is read from there on anyway."""
    earlier = [node for node in nodes[:place] if node in realised]
    behind = set(nodes[place:])
    return next((node for node in reversed(earlier[-8:]) if behind & set(node.users)), earlier[-1] if earlier else None)
