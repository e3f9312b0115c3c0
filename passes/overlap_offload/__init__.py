"""overlap_offload: saved tensors go to the host and come back while the device computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import glue_compiler.ops.offload  # noqa: F401  a graph from the cache calls the operators, and no pass runs for it
from glue_compiler.compat import inductor, offload_policies
from glue_compiler.errors import GlueOffloadError
from glue_compiler.fx import bodies
from glue_compiler.fx.values import value_of
from glue_compiler.passes.overlap_offload.checker import check_offload
from glue_compiler.passes.overlap_offload.copies import find_round_trips, may_copy, save_sources
from glue_compiler.passes.overlap_offload.rewrite import apply_schedule
from glue_compiler.passes.overlap_offload.saved_tensors import RegionTensors, find_saved_tensors
from glue_compiler.passes.overlap_offload.schedule import schedule_moves
from glue_compiler.pipeline.fuel import Fuel
from glue_compiler.pipeline.graph_pass import PairPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics, Skip

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.fx.training_pair import TrainingPair
    from glue_compiler.options import GlueOptions

BUFFERS = 2
ONLY_LAST = "nothing to move: only the last region has a saved input, which backward needs at once"
NO_REGION = (
    "no checkpointed region with a saved input that the graph itself makes: nothing to move "
    "(glue_compiler.offload_checkpoints() moves the inputs of layers that are compiled one by one)"
)


class OverlapOffload(PairPass):
    """Move saved tensors to the host, with copies that overlap with compute.

    Which: the inputs of checkpointed regions (``options={"offload": "checkpoints"}``); what a selective checkpoint
    policy marks with ``MUST_CPU_OFFLOAD`` or ``PREFER_CPU_OFFLOAD``; and what the graph copies to the host and back by
    itself. Counts: ``regions`` found, ``moved`` tensors, ``bytes`` moved in a step (with dynamic shapes at most).

    Bitwise as long as operators run one by one: a compiler that fuses rounds a tensor that is written out.
    """

    name: ClassVar[str] = "overlap_offload"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def cache_options(self, options: GlueOptions) -> Any:
        return options.offload, options.pinned_limit

    def is_asked_for(self, options: GlueOptions) -> bool:
        return options.offload is not None or offload_policies.torch_offloads()

    def wants_pairs(self, graph: fx.GraphModule, options: GlueOptions) -> bool:
        policies = any(map(offload_policies.has_selective_policy, bodies.graph_modules(graph)))
        return self.is_asked_for(options) or policies or may_copy(graph)

    def inductor_options(self, options: GlueOptions) -> Mapping[str, Any]:
        if options.offload is None:
            return {}
        # Reordering for peak memory does not know that a start returns before its copy has ended. Data dependencies
        # keep starts and waits in order all the same, so whoever asked for no offload keeps it. And what a later value
        # of the same size may reuse stays allocated until then, as far as Inductor's own estimate of the peak allows,
        # which does not know what kernels take for themselves: torch's allocator reuses it too, and for any size.
        return {"reorder_for_peak_memory": False, "allow_buffer_reuse": False}

    def run_pair(self, pair: TrainingPair, context: PassContext) -> PassResult:
        options = context.options
        if inductor.uses_cuda_graphs(options.inductor):
            return _refuse_cuda_graphs(pair)
        trips, skips = find_round_trips(pair)
        trips = list(context.fuel.allowed((f"reschedule the copies of {t.source.name}", t) for t in trips))
        save_sources(pair, trips)
        asked = options.offload is not None
        regions, more = find_saved_tensors(
            pair, context.shape_env, all_inputs=asked, copied=[trip.source for trip in trips]
        )
        skips += more
        if asked and _is_on_the_host(regions):
            skips.insert(
                0, Skip("this is a CPU: checkpoint inputs are in host memory anyway, and moving frees nothing")
            )
        moved = _moved(regions)
        schedule = schedule_moves(pair, regions, _allowed(regions, moved, context.fuel), BUFFERS)
        skips += [*schedule.skips, *_preferred_but_left(regions, moved)]
        counts = {"regions": len(regions)}
        if schedule.moves:
            groups = apply_schedule(pair, schedule, options.pinned_limit, BUFFERS)
            check_offload(pair, groups, schedule.buffers)
            tensors = [move.one for region in schedule.moves for move in region]
            counts |= {"moved": len(tensors), "bytes": sum(one.nbytes for one in tensors)}
        elif asked:
            skips.append(Skip(ONLY_LAST if regions else NO_REGION))
        return PassResult(changed=bool(schedule.moves), counts=counts, skips=tuple(skips))


def _moved(regions: Sequence[RegionTensors]) -> list[int]:
    """All but the last, which backward needs at once, and but those of no bytes; what must move, wherever it is."""
    return [each.index for each in regions if each.is_required or (each.nbytes and each is not regions[-1])]


def _is_on_the_host(regions: list[RegionTensors]) -> bool:
    devices = {value_of(one.saved).device.type for region in regions for one in region.tensors}
    return devices == {"cpu"}


def _allowed(regions: list[RegionTensors], moved: Collection[int], fuel: Fuel) -> list[int]:
    """The regions that may move. What the graph itself moved was asked for before, and must move again."""
    own = {region.index for region in regions if any(one.wish == "copy" for one in region.tensors)}
    return [index for index in moved if index in own or fuel.take(f"move the tensors of region {index}")]


def _preferred_but_left(regions: Sequence[RegionTensors], moved: Collection[int]) -> list[Skip]:
    left = [one for region in regions if region.index not in moved for one in region.tensors]
    reason = "PREFER_CPU_OFFLOAD marks it, and it stays: backward needs the last region's inputs at once"
    return [one.skip(reason) for one in left if one.wish == "prefer"]


def _refuse_cuda_graphs(pair: TrainingPair) -> PassResult:
    reason = "CUDA graphs replay memory at fixed addresses and hold no host tensors; without them, inputs move"
    if any(offload_policies.wish_of(saved) == "must" for saved in pair.saved):
        raise GlueOffloadError(f"CheckpointPolicy.MUST_CPU_OFFLOAD cannot be kept: {reason}")
    return PassResult(changed=False, skips=(Skip(reason),))
