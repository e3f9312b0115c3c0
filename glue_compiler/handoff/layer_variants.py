"""A checkpointed layer is compiled twice: to compute its inside again in backward, and to keep what backward needs.

What a call keeps stays on the device, or is moved to the host until backward comes to the layer behind it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from glue_compiler.capture import KnownLayers
from glue_compiler.compat import dynamo, partition, python_checkpoints, runtime, saved_tensor_hooks
from glue_compiler.compat.operators import is_of_others
from glue_compiler.compat.wrapper_tensors import is_wrapper
from glue_compiler.errors import GlueWarning
from glue_compiler.fx.bodies import CHECKPOINT, graph_modules
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.effects import EffectAnalysis, Kind
from glue_compiler.handoff.hand_off import HandOff
from glue_compiler.memory.layer_plan import Budget, Call, LayerPlan, memory_on
from glue_compiler.memory.layer_roles import Choice
from glue_compiler.options import GlueOptions


@dataclass(frozen=True)
class LayerVariants:
    """The compiled code of layers of one kind: each call is one of two, as ``plan`` decides.

    ``weight``: the input that tells layers apart. ``states``: the one whose size tells how much a call takes, and which
    may lie on the host. ``gradients``: bytes, of its parameters.
    """

    plan: LayerPlan
    kind: Hashable
    weight: int
    states: int
    computes_again: Callable[..., Any]
    keeps: Callable[..., Any]
    gradients: int

    def __call__(self, *inputs: Any) -> Any:
        # A checkpoint around the call calls it again in backward, and has to meet what it met before.
        hooks = saved_tensor_hooks.are_active() or saved_tensor_hooks.are_forbidden()
        if hooks or not torch.is_grad_enabled() or runtime.backward_id() is not None:
            return self.computes_again(*inputs)
        plan, layer, states = self.plan, id(inputs[self.weight]), inputs[self.states]
        asked = Call(layer, self.kind, states.numel(), plan.mover.bytes_of(states), self.gradients)
        role = plan.role(asked)
        before = plan.before_call(asked, role)
        again = role.choice is Choice.AGAIN
        try:
            call, own = self.computes_again if again else self.keeps, states if asked.input_bytes else None
            results = plan.mover.run(call, inputs, layer, role, own)
        except torch.OutOfMemoryError as error:
            if not again and hasattr(error, "add_note"):
                error.add_note("glue: fewer layers will keep what backward needs. Run this step again.")
            plan.ran_out()
            raise
        plan.called(asked, role, before, results)
        return results


class LayerPlans:
    """Of one backend: a plan for each device and budget, of devices that say what they hold."""

    def __init__(self) -> None:
        self._plans: dict[tuple[torch.device, Budget], LayerPlan] = {}

    def plan_for(
        self, known: KnownLayers, gm: fx.GraphModule, inputs: Sequence[Any], budget: Budget | None
    ) -> LayerPlan | None:
        """Of the layers that are compiled as ``gm``; None where nothing is to be chosen, or can be."""
        if budget is None or not torch.is_grad_enabled() or runtime.backward_is_compiled():
            return None
        if known.converting is None:
            if not known.are_found and any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
                _tell("no layers are found that are called one after another, as always with fullgraph=True")
            return None
        if dynamo.is_piece_for_ddp():  # for each of which torch expects one compile
            _tell(f"DDP cuts {known.converting} into pieces, unless torch._dynamo.config.optimize_ddp is False")
            return None
        device = next((value.device for value in inputs if isinstance(value, torch.nn.Parameter)), None)
        if device is None:
            if _checkpoints_in(gm):  # else it is a part of a layer, as a hook behind it is
                _tell(f"{known.converting} has no parameters, which tell layers apart")
            return None
        if (memory := memory_on(device)) is None:
            _tell(f"it is about the memory of a CUDA device, and {known.converting} computes on '{device}'")
            return None
        return self._plans.setdefault((device, budget), LayerPlan(budget, memory))

    def clear(self) -> None:
        self._plans.clear()


def _tell(reason: str) -> None:
    warnings.warn(f"glue: memory_budget chooses nothing: {reason}", GlueWarning, stacklevel=2)


def with_variants(hand_off: HandOff, plan: LayerPlan | None, kind: Hashable, effects: EffectAnalysis) -> HandOff:
    """``hand_off``, which with a plan compiles a layer of this kind twice, if it has a choice.

    Args:
        effects: of the layer's graph.
    """
    if plan is None:
        return hand_off

    def compile_both(
        gm: fx.GraphModule, inputs: Sequence[Any], options: GlueOptions, uuid: bytes | None, *edit: partition.Edit
    ) -> Callable[..., Any]:
        weight, states = _weight_in(inputs), _states_in(inputs)
        if weight is None or states is None:
            return hand_off(gm, inputs, options, uuid, *edit)
        if (reason := _why_no_choice(gm, inputs, effects)) is not None:
            _tell(f"{kind} {reason}")
            return hand_off(gm, inputs, options, uuid, *edit)
        plan.compiles()
        other = copy_graph_module(gm)
        computes_again = hand_off(gm, inputs, options, uuid, *edit)
        keep = replace(edit[0] if edit else partition.Edit(lambda *_: None), keeps_all=True)
        key = None if uuid is None else hashlib.sha256(uuid + b"keeps").digest()
        keeps = hand_off(other, inputs, options, key, keep)
        gradients = _gradients_of(inputs)
        # Layers of one shape of which other weights train keep and leave something else.
        return LayerVariants(plan, (kind, gradients), weight, states, computes_again, keeps, gradients)

    return compile_both


def _why_no_choice(gm: fx.GraphModule, inputs: Sequence[Any], effects: EffectAnalysis) -> str | None:
    """Are there checkpoints, and would all that they hold be the same again? What they write to may not be."""
    checkpoints = _checkpoints_in(gm)
    if not checkpoints:
        in_python = python_checkpoints.in_body()
        return "is checkpointed by Python, as where a hook is" if in_python else "has no checkpoint to choose in"
    done = [effects.of(gm, node) for node in checkpoints]
    if any(each.writes or each.kind is Kind.BARRIER for each in done):
        return "has a checkpoint that writes memory from outside"
    if _is_one_of_several_ranks() and _may_communicate(gm, inputs):
        return "may communicate in a checkpoint, and each rank decides for itself what it computes again"
    return None


def _checkpoints_in(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=CHECKPOINT))


def _is_one_of_several_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _may_communicate(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Operators that are not torch's may; tensors in parts on several ranks do where they meet others."""
    called = (node.target for module in graph_modules(gm) for node in module.graph.nodes)
    return any(map(is_of_others, called)) or any(isinstance(x, torch.Tensor) and is_wrapper(x) for x in inputs)


def _weight_in(inputs: Sequence[Any]) -> int | None:
    return next((i for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)), None)


def _gradients_of(inputs: Sequence[Any]) -> int:
    return sum(each.nbytes for each in inputs if isinstance(each, torch.nn.Parameter) and each.requires_grad)


def _states_in(inputs: Sequence[Any]) -> int | None:
    """The input that a layer's activations grow with: the first that asks for a gradient, or that is floating."""
    made = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.is_floating_point()]
    made = [i for i in made if not isinstance(inputs[i], torch.nn.Parameter)]
    return next((i for i in made if inputs[i].requires_grad), next(iter(made), None))
