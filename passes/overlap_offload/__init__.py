"""overlap_offload: checkpoint inputs go to the host and come back while the device computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import glue_compiler.ops.offload  # noqa: F401  a graph from the cache calls the operators, and no pass runs for it
from glue_compiler.compat import inductor as compat
from glue_compiler.graph_pass import Numerics, PairPass, PassContext, PassResult, Skip
from glue_compiler.passes.overlap_offload.analysis import find_saved_inputs, schedule_moves
from glue_compiler.passes.overlap_offload.checker import check_offload
from glue_compiler.passes.overlap_offload.plan import plan_offload
from glue_compiler.passes.overlap_offload.rewrite import apply_schedule

if TYPE_CHECKING:
    from glue_compiler.fx.training_pair import TrainingPair

BUFFERS = 2


class OverlapOffload(PairPass):
    """Move the saved inputs of checkpointed regions to the host, with copies that overlap with compute.

    Off unless ``options={"offload": "checkpoints"}`` asks for it. Counts: ``regions`` found, ``moved`` tensors,
    ``bytes`` moved in a step (an upper bound with dynamic shapes; 0 where none is known).
    """

    name: ClassVar[str] = "overlap_offload"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def cache_options(self, options: Any) -> Any:
        return options.offload, options.pinned_limit

    def wants_pairs(self, options: Any) -> bool:
        return options.offload is not None

    def run_pair(self, pair: TrainingPair, context: PassContext) -> PassResult:
        if compat.uses_cuda_graphs(context.options.inductor):
            reason = "CUDA graphs replay memory at fixed addresses and hold no host tensors; without them, inputs move"
            return PassResult(changed=False, skips=(Skip(reason),))
        regions, skips = find_saved_inputs(pair, context.shape_env)
        plan = plan_offload([region.as_region() for region in regions], None, policy="all", buffers=BUFFERS)
        schedule = schedule_moves(pair, regions, plan.moved, BUFFERS)
        skips += schedule.skips
        if not schedule.moves:
            reason = plan.reason if regions else "no checkpointed region with a saved input of its own: nothing to move"
            return PassResult(changed=False, counts={"regions": len(regions)}, skips=(*skips, Skip(reason)))
        groups = apply_schedule(pair, schedule, context.options.pinned_limit, BUFFERS)
        check_offload(pair, groups, BUFFERS)
        moved = [move.one for region in schedule.moves for move in region]
        counts = {"regions": len(regions), "moved": len(moved), "bytes": sum(one.nbytes for one in moved)}
        return PassResult(changed=True, counts=counts, skips=tuple(skips))
