"""Where the copies of saved tensors start and end. Changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx
from torch.utils.flop_counter import flop_registry

from glue_compiler.fx.storage_roots import storage_root
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.fx.values import makes_tensor
from glue_compiler.passes.overlap_offload.saved_tensors import RegionTensors, SavedTensor
from glue_compiler.pipeline.results import Skip


@dataclass(frozen=True)
class Move:
    """One tensor's way to the host and back, as places in front of which an operator goes.

    Forward: the copy starts in front of ``offload_start`` and is waited for in front of ``offload_wait``. Backward: the
    reload starts in front of ``reload_start``, and ends in front of ``reload_wait``, the tensor's first use there.
    ``*_after`` is a value that exists at that place anyway and that the operator must follow.
    """

    one: SavedTensor
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

    ``buffers``: the most regions whose tensors are reloaded and alive at one time;
    more than was asked for only where tensors that must move are needed together.
    """

    moves: tuple[tuple[Move, ...], ...]
    buffers: int
    skips: tuple[Skip, ...]


@dataclass(frozen=True)
class _Reload:
    region: RegionTensors
    start: int


def schedule_moves(
    pair: TrainingPair, regions: Sequence[RegionTensors], moved: Collection[int], buffers: int
) -> Schedule:
    """Where the copies of the regions in ``moved`` start and end, so that at most ``buffers`` are alive at any place.

    A region whose reload could not start before its first use stays where it is, unless it must move: then it is
    reloaded just before that.
    """
    forward, backward = list(pair.forward.graph.nodes), list(pair.backward.graph.nodes)
    reloads, skips = _reloads(backward, regions, moved, buffers)
    realised, realised_backward = realised_values(pair.forward), realised_values(pair.backward)
    order = sorted(reloads, key=lambda reload: reload.region.end)
    starts = [reload.region.end + 1 for reload in order]
    waits = _offload_waits(starts, [region.end + 1 for region in regions], len(forward) - 1, buffers)
    moves = tuple(
        tuple(
            Move(
                one,
                offload_start=forward[reload.region.end + 1],
                offload_wait=forward[wait],
                offload_after=_latest(forward, wait, realised),
                reload_start=backward[reload.start],
                reload_wait=backward[one.first_use],
                start_after=_latest(backward, reload.start, realised_backward),
                wait_after=_latest(backward, one.first_use, realised_backward),
            )
            for one in reload.region.tensors
        )
        for reload, wait in zip(order, waits, strict=True)
    )
    alive = [sum(other.start <= one.start <= other.region.last_use for other in reloads) for one in reloads]
    return Schedule(moves, max(buffers, *alive, 0), tuple(skips))


def _reloads(
    backward: Sequence[fx.Node], regions: Sequence[RegionTensors], moved: Collection[int], buffers: int
) -> tuple[list[_Reload], list[Skip]]:
    """When each reload starts, in the order of backward: with the region before, or when a place is free."""
    reloads: list[_Reload] = []
    skips = []
    start = next(place for place, node in enumerate(backward) if node.op != "placeholder")
    for region in reversed(regions):
        if region.index in moved:
            ends = sorted(reload.region.last_use for reload in reloads)
            free = ends[-buffers] + 1 if len(ends) >= buffers else 0
            place = max(start, free, region.earliest)
            if place < region.first_use or region.is_required:
                reloads.append(_Reload(region, min(place, region.first_use)))
            else:
                reason = (
                    "backward still needs earlier inputs when it needs this one, so that a copy could not be hidden"
                )
                skips.append(region.tensors[0].skip(reason))
        start = region.first_use
    return reloads, skips


def _offload_waits(starts: Sequence[int], all_ends: Sequence[int], last: int, buffers: int) -> list[int]:
    """Where each copy to the host is waited for: behind the next region, which hides it. ``last``: the forward's end.

    Waiting later would keep its source alive for longer and, as copies run one by one, gain no time in a long run. A
    start that would be one too many under way comes behind an earlier wait.
    """
    latest = [*starts[buffers:], *[last] * buffers]
    waits = [min((end for end in all_ends if end > start), default=last) for start in starts]
    return [min(wait, bound) for wait, bound in zip(waits, latest, strict=False)]


def is_product(node: fx.Node) -> bool:
    """A matrix product, a convolution or attention: a kernel of its own under any compiler."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def realised_values(gm: fx.GraphModule) -> set[fx.Node]:
    """Tensors that exist in memory whatever a compiler fuses: what products and attention read and write.

    An operator that must follow such a value costs nothing; one that must follow a value in the middle of a fused
    kernel would make the kernel write it out.
    """
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if is_product(node):
            found.add(node)
            found.update(map(storage_root, node.all_input_nodes))
    found.update(map(storage_root, gm.graph.output_node().all_input_nodes))
    return {node for node in found if node.op == "call_function" and makes_tensor(node)}


def _latest(nodes: Sequence[fx.Node], place: int, realised: set[fx.Node]) -> fx.Node | None:
    """The value in ``realised`` computed last before ``place``: preferably one that is read from there on anyway."""
    earlier = [node for node in nodes[:place] if node in realised]
    behind = set(nodes[place:])
    return next((node for node in reversed(earlier[-8:]) if behind & set(node.users)), earlier[-1] if earlier else None)
