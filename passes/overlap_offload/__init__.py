"""overlap_offload: saved tensors go to the host and come back while the device computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import glue_compiler.ops.offload  # noqa: F401  a graph from the cache calls the operators, and no pass runs for it
from glue_compiler.compat import inductor, offload_policies
from glue_compiler.errors import GlueOffloadError
from glue_compiler.fx import bodies
from glue_compiler.graph_pass import Numerics, PairPass, PassContext, PassResult, Skip
from glue_compiler.passes.overlap_offload.checker import check_offload
from glue_compiler.passes.overlap_offload.copies import find_round_trips, may_copy, save_sources
from glue_compiler.passes.overlap_offload.plan import Region, plan_offload
from glue_compiler.passes.overlap_offload.rewrite import apply_schedule
from glue_compiler.passes.overlap_offload.saved_tensors import RegionTensors, find_saved_tensors
from glue_compiler.passes.overlap_offload.schedule import schedule_moves

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.fx.training_pair import TrainingPair
    from glue_compiler.options import GlueOptions

BUFFERS = 2


class OverlapOffload(PairPass):
    """Move saved tensors to the host, with copies that overlap with compute.

    Which: the inputs of checkpointed regions (``options={"offload": "checkpoints"}``), what a selective checkpoint
    policy marks with ``MUST_CPU_OFFLOAD`` or ``PREFER_CPU_OFFLOAD``, and what the graph copies to the host and back
    by itself. Counts: ``regions`` found, ``moved`` tensors, ``bytes`` moved in a step (an upper bound with dynamic
    shapes; 0 where none is known).

    Bitwise as long as operators run one by one: a compiler that fuses rounds a tensor that is written out.
    """

    name: ClassVar[str] = "overlap_offload"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def cache_options(self, options: GlueOptions) -> Any:
        return options.offload, options.pinned_limit

    def wants_pairs(self, graph: fx.GraphModule, options: GlueOptions) -> bool:
        policies = any(map(offload_policies.has_selective_policy, bodies.graph_modules(graph)))
        return options.offload is not None or policies or offload_policies.torch_offloads() or may_copy(graph)

    def inductor_options(self, options: GlueOptions) -> Mapping[str, Any]:
        # Reordering for peak memory does not know that a start returns before its copy has ended. Data dependencies
        # keep starts and waits in order all the same, so whoever asked for no offload keeps it.
        return {"reorder_for_peak_memory": False} if options.offload is not None else {}

    def run_pair(self, pair: TrainingPair, context: PassContext) -> PassResult:
        options = context.options
        if inductor.uses_cuda_graphs(options.inductor):
            return _refuse_cuda_graphs(pair)
        trips, skips = find_round_trips(pair)
        save_sources(pair, trips)
        regions, more = find_saved_tensors(
            pair, context.shape_env, all_inputs=options.offload is not None, copied=[trip.source for trip in trips]
        )
        skips += more
        required = [region.index for region in regions if region.is_required]
        plan = plan_offload(list(map(_as_region, regions)), None, policy="all", buffers=BUFFERS, required=required)
        schedule = schedule_moves(pair, regions, plan.moved, BUFFERS)
        skips += [*schedule.skips, *_preferred_but_left(regions, plan.moved, plan.reason)]
        if not schedule.moves:
            if options.offload is not None:
                nothing = "no checkpointed region with a saved input of its own: nothing to move"
                skips.append(Skip(plan.reason if regions else nothing))
            return PassResult(changed=False, counts={"regions": len(regions)}, skips=tuple(skips))
        groups = apply_schedule(pair, schedule, options.pinned_limit, BUFFERS)
        check_offload(pair, groups, schedule.buffers)
        moved = [move.one for region in schedule.moves for move in region]
        counts = {"regions": len(regions), "moved": len(moved), "bytes": sum(one.nbytes for one in moved)}
        return PassResult(changed=True, counts=counts, skips=tuple(skips))


def _as_region(region: RegionTensors) -> Region:
    return Region(region.index, region.nbytes, 0.0, 0.0)


def _preferred_but_left(regions: list[RegionTensors], moved: tuple[int, ...], reason: str) -> list[Skip]:
    left = [one for region in regions if region.index not in moved for one in region.tensors]
    return [
        one.skip(f"PREFER_CPU_OFFLOAD marks it, and it stays; what moves: {reason}")
        for one in left
        if one.wish == "prefer"
    ]


def _refuse_cuda_graphs(pair: TrainingPair) -> PassResult:
    reason = "CUDA graphs replay memory at fixed addresses and hold no host tensors; without them, inputs move"
    if any(offload_policies.wish_of(saved) == "must" for saved in pair.saved):
        raise GlueOffloadError(f"CheckpointPolicy.MUST_CPU_OFFLOAD cannot be kept: {reason}")
    return PassResult(changed=False, skips=(Skip(reason),))
