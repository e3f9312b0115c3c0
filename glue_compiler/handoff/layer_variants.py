"""A checkpointed layer is compiled twice: to compute its inside again in backward, and to keep what backward needs.

What a call keeps stays on the device, or is moved to the host until backward comes to the layer behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from glue_compiler.compat import checkpoint_tags, partition, runtime, saved_tensor_hooks
from glue_compiler.fx.bodies import CHECKPOINT
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.handoff.hand_off import HandOff
from glue_compiler.memory.layer_plan import Budget, LayerPlan, memory_on
from glue_compiler.memory.layer_roles import Choice
from glue_compiler.options import GlueOptions


@dataclass(frozen=True)
class LayerVariants:
    """The compiled code of layers of one kind: each call is one of two, as ``plan`` decides.

    ``weight``: the input that tells layers apart. ``states``: the one whose size tells how much a call takes.
    """

    plan: LayerPlan
    kind: Hashable
    weight: int
    states: int
    computes_again: Callable[..., Any]
    keeps: Callable[..., Any]

    def __call__(self, *inputs: Any) -> Any:
        # A checkpoint around the call calls it again in backward, and has to meet what it met before.
        if not torch.is_grad_enabled() or saved_tensor_hooks.are_active() or runtime.backward_id() is not None:
            return self.computes_again(*inputs)
        plan, layer, units = self.plan, id(inputs[self.weight]), inputs[self.states].numel()
        role, before = plan.role(layer, self.kind, units), plan.before_call()
        again = role.choice is Choice.AGAIN
        try:
            results = plan.mover.run(self.computes_again if again else self.keeps, inputs, layer, role)
        except torch.OutOfMemoryError as error:
            if not again and hasattr(error, "add_note"):
                error.add_note("glue: fewer layers will keep what backward needs. Run this step again.")
            plan.ran_out()
            raise
        plan.called(layer, units, role.choice, before, results)
        return results


class LayerPlans:
    """Of one backend: a plan for each device and budget, of devices that say what they hold."""

    def __init__(self) -> None:
        self._plans: dict[tuple[torch.device, Budget], LayerPlan] = {}

    def plan_for(self, inputs: Sequence[Any], budget: Budget) -> LayerPlan | None:
        """Of the layers that are compiled for ``inputs``; None where they have no choice."""
        device = next((value.device for value in inputs if isinstance(value, torch.nn.Parameter)), None)
        if device is None or not torch.is_grad_enabled() or runtime.backward_is_compiled():
            return None
        memory = memory_on(device)
        return None if memory is None else self._plans.setdefault((device, budget), LayerPlan(budget, memory))

    def clear(self) -> None:
        self._plans.clear()


def with_variants(hand_off: HandOff, plan: LayerPlan, kind: Hashable, effects: EffectAnalysis) -> HandOff:
    """``hand_off``, which compiles a layer of this kind twice, if it has a checkpoint. ``effects``: of its graph."""

    def compile_both(
        gm: fx.GraphModule, inputs: Sequence[Any], options: GlueOptions, uuid: bytes | None, *edit: partition.Edit
    ) -> Callable[..., Any]:
        weight, states = _weight_in(inputs), _states_in(inputs)
        if weight is None or states is None or not _has_a_choice(gm, effects):
            return hand_off(gm, inputs, options, uuid, *edit)
        plan.compiles()
        other = copy_graph_module(gm)
        computes_again = hand_off(gm, inputs, options, uuid, *edit)
        keep = replace(edit[0] if edit else partition.Edit(lambda *_: None), joint=_keep_all)
        key = None if uuid is None else hashlib.sha256(uuid + b"keeps").digest()
        return LayerVariants(plan, kind, weight, states, computes_again, hand_off(other, inputs, options, key, keep))

    return compile_both


def _has_a_choice(gm: fx.GraphModule, effects: EffectAnalysis) -> bool:
    """Are there checkpoints, and would all that they hold be the same again? What they write to may not be."""
    checkpoints = gm.graph.find_nodes(op="call_function", target=CHECKPOINT)
    done = [effects.of(gm, node) for node in checkpoints]
    return bool(done) and not any(each.writes or each.kind is Kind.BARRIER for each in done)


def _keep_all(joint: fx.GraphModule, num_outputs: int, partitioned: Callable[[], partition.Graphs]) -> partition.Graphs:
    """Keep products and attention; to keep what is fused with them costs memory, and to compute it little."""
    checkpoint_tags.forget_preferences(joint.graph)
    with partition.recomputing_what_is_fused():
        return partitioned()


def _weight_in(inputs: Sequence[Any]) -> int | None:
    return next((i for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)), None)


def _states_in(inputs: Sequence[Any]) -> int | None:
    """The input that a layer's activations grow with: the first that asks for a gradient, or that is floating."""
    made = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.is_floating_point()]
    made = [i for i in made if not isinstance(inputs[i], torch.nn.Parameter)]
    return next((i for i in made if inputs[i].requires_grad), next(iter(made), None))
