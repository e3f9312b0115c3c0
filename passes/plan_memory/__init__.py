"""plan_memory: what a step keeps for backward, computes again, or moves to the host, so that it fits a budget."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from glue_compiler.byte_sizes import with_unit
from glue_compiler.compat import inductor
from glue_compiler.errors import GlueWarning
from glue_compiler.fx import joint_graphs
from glue_compiler.fx.device_bytes import device_of, of_unknown_size
from glue_compiler.fx.values import is_in_order, is_plain, value_of
from glue_compiler.ops.copy_engine import why_no_copies
from glue_compiler.ops.device_rates import rates_of
from glue_compiler.passes.overlap_offload.memory import kept_bytes, peak_of
from glue_compiler.passes.plan_memory.costs import Costs
from glue_compiler.passes.plan_memory.plan import SECONDS, MemoryPlan, plan_memory
from glue_compiler.passes.plan_memory.step import TrainingStep, read_step
from glue_compiler.pipeline.graph_pass import JointPass, PassContext, PassResult
from glue_compiler.pipeline.results import Numerics, Skip

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.fx.training_pair import TrainingPair
    from glue_compiler.options import GlueOptions
    from glue_compiler.pipeline.results import PassReport

MARGIN = 0.97
"""The share of the budget that is planned for: predictions here and from the partitioned graphs differ by less."""
TIGHTER = 2
"""How often a plan that the finished graphs exceed is made again with a tighter limit, before offloading is dropped."""

NOT_COUNTED = "the predicted peak is without {count} values, whose sizes are known only when the graph runs"
NO_TIME = "planning ended when its {seconds:.0f} s were over: the best of the first {count} plans is taken"


class PlanMemory(JointPass):
    """With ``memory_budget``, decide for every value that backward needs: keep it, compute it again, or let it wait on
    the host.

    Counts, predicted: ``peak`` bytes, those ``held`` with what other calls keep that wait for their backward, and
    ``microseconds`` of a step; ``least_peak`` and ``least_microseconds``: of any plan that was looked at;
    ``saved_bytes``, of which ``moved_bytes`` are copied; numbers of ``recomputed`` kernels, and of ``plans`` looked at.

    Bitwise as long as operators run one by one: a compiler that fuses rounds a tensor that is written out.
    """

    name: ClassVar[str] = "plan_memory"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    default: ClassVar[bool] = True

    def __init__(
        self,
        moves: bool = True,
        limits: tuple[int, ...] = (),
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.moves, self.limits = moves, limits
        """May values wait on the host? And bytes that a plan may take at most: what earlier ones said that they take,
        less what the graphs made of them took too much."""
        self.seconds, self.clock = seconds, clock
        """What is best after so many of ``clock``'s seconds is taken."""

    def cache_options(self, options: GlueOptions) -> Any:
        return options.budget, options.correction.calls, self.moves

    def simpler(self, report: PassReport, excess: int) -> PlanMemory | None:
        counts = report.counts
        if not report.changed:
            return None
        left = max(self.seconds / 2, self.seconds - report.milliseconds / 1e3)
        if excess > 0 and len(self.limits) < TIGHTER and counts["peak"] > counts["least_peak"]:
            limits = (*self.limits, counts["held"] - excess)
            return PlanMemory(moves=self.moves, limits=limits, seconds=left, clock=self.clock)
        if self.moves and counts["moved_bytes"]:
            return PlanMemory(moves=False, seconds=left, clock=self.clock)
        return None

    def excess(self, pair: TrainingPair, context: PassContext) -> int:
        """Bytes by which the predicted peak of a pair is above the budget."""
        budget = context.options.budget
        assert budget is not None
        device = device_of(pair.forward.graph.find_nodes(op="placeholder"))
        if device is None:
            return 0
        costs = Costs(rates_of(device), device)
        peak = peak_of(
            pair,
            context.shape_env,
            only_realised=context.options.compiler == "inductor",
            scratch=lambda node: costs.of(node, context.shape_env).scratch,
        )
        correction = context.options.correction
        if correction.is_measured:  # else the calls are a guess, and too many
            peak += (correction.calls - 1) * kept_bytes(pair, context.shape_env)
        return max(0, peak - budget)

    def wants_joint(self, graph: fx.GraphModule, options: GlueOptions) -> bool:
        return options.budget is not None

    def run_joint(self, joint: fx.GraphModule, num_outputs: int, context: PassContext) -> PassResult:
        budget = context.options.budget
        assert budget is not None
        device = device_of(joint.graph.find_nodes(op="placeholder"))
        if device is None:
            return PassResult(changed=False, skips=(Skip("nothing here computes with tensors"),))
        rates = rates_of(device)
        step, nodes = read_step(joint, num_outputs, Costs(rates, device), context.shape_env)
        if not step.needed:
            return PassResult(changed=False, skips=(Skip("backward needs nothing but the graph's inputs"),))
        moves = self.moves and not inductor.uses_cuda_graphs(context.options.inductor) and why_no_copies(device) is None
        fuses = context.options.compiler == "inductor"
        movable = _movable(step, nodes) if moves else frozenset()
        correction = context.options.correction
        room = min((int(MARGIN * budget), *self.limits))
        waiting = correction.calls - 1
        plan = plan_memory(
            step, rates, room, movable, fuses=fuses, waiting=waiting, seconds=self.seconds, clock=self.clock
        )
        counts = _counts(step, plan, waiting)
        unknown = of_unknown_size(joint.graph, context.shape_env)
        told = [Skip(NOT_COUNTED.format(count=len(unknown)), unknown[0].name)] if unknown else []
        if plan.is_cut:
            told.append(Skip(NO_TIME.format(seconds=self.seconds, count=plan.looked_at)))
        if correction.is_measured:
            told.append(Skip(f"planned again: {correction.told}"))
            told += _over_budget(plan.held(waiting), context.options)
        skips = tuple(told)
        if not context.fuel.take("keep, recompute and move by plan"):
            return PassResult(changed=False, counts=counts, skips=skips)
        _write(plan, step, nodes)
        return PassResult(changed=True, counts=counts, skips=skips)


def _over_budget(held: int, options: GlueOptions) -> list[Skip]:
    """Of several calls; that one alone does not fit is told when its copies are made."""
    assert options.budget is not None
    assert isinstance(options.memory_budget, int)
    calls = options.correction.calls
    if calls == 1 or held <= options.budget:
        return []
    reason = (
        f"the memory_budget of {with_unit(options.memory_budget)} cannot be kept: {calls} calls that wait for their "
        f"backward hold {with_unit(held)}, and {with_unit(options.budget)} are left for them. A shorter sequence or a "
        "smaller batch lower it."
    )
    warnings.warn(f"glue: {reason}", GlueWarning, stacklevel=2)
    return [Skip(reason)]


def _movable(step: TrainingStep, nodes: list[fx.Node]) -> frozenset[int]:
    """Values that a copy could stand for; those of ``overlap_offload``, which has the last word."""
    returned = {step.values[place].root for place in (*step.outputs, *step.gradients)}
    return frozenset(
        place
        for place, value in enumerate(step.values)
        if value.nbytes and place not in returned
        if isinstance(found := value_of(nodes[place]), torch.Tensor) and is_plain(found) and is_in_order(found)
    )


def _write(plan: MemoryPlan, step: TrainingStep, nodes: list[fx.Node]) -> None:
    """As marks of a selective checkpoint on the joint graph's nodes."""
    numbers = dict(plan.segments)
    readers: dict[int, list[int]] = {}
    for place in sorted(plan.recomputed, reverse=True):
        # The partitioner saves what a later region recomputes from: a view is computed again from what it is of.
        if step.values[place].root != place:
            numbers[place] = max([numbers[place], *readers.get(place, ())])
        for read in step.values[place].inputs:
            readers.setdefault(read, []).append(numbers[place])
    joint_graphs.unmark(
        (node for node, value in zip(nodes, step.values, strict=True) if not value.is_backward),
        {nodes[place]: number for place, number in numbers.items()},
    )
    joint_graphs.mark(
        (nodes[place] for place in plan.saved if not step.values[place].is_symbol),
        (nodes[place] for place in plan.moved),
        (nodes[place] for place in plan.recomputed if not step.values[place].is_symbol),
    )


def _counts(step: TrainingStep, plan: MemoryPlan, waiting: int) -> Mapping[str, int]:
    return {
        "peak": plan.peak,
        "held": plan.held(waiting),
        "microseconds": round(plan.seconds * 1e6),
        "least_microseconds": round(plan.least_seconds * 1e6),
        "least_peak": plan.least_peak,
        "saved_bytes": sum(step.values[place].nbytes for place in plan.saved),
        "moved_bytes": sum(step.values[place].nbytes for place in plan.moved),
        "recomputed": sum(step.values[place].is_kernel for place in plan.recomputed),
        "plans": plan.looked_at,
    }
