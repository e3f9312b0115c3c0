"""A loop of equal steps, each of which is one graph: its length is a number, and no part of the graph that calls it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from glue_compiler.compat.dispatch_state import outside_of_operators
from glue_compiler.ops.loop_gradients import StepGradients, zeros
from glue_compiler.ops.opaque import opaque

Autocast = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class _Body:
    graph: fx.GraphModule
    gradients: StepGradients
    autocast: Autocast

    @property
    def text(self) -> str:
        return f"{self.graph.code}\n{self.gradients}\n{self.autocast}"

    def does_as(self, other: _Body) -> bool:
        targets = [[node.target for node in each.graph.graph.nodes] for each in (self, other)]
        return self.text == other.text and targets[0] == targets[1]


_bodies: dict[str, _Body] = {}


def add_body(graph: fx.GraphModule, gradients: StepGradients, autocast: Autocast = ()) -> str:
    """Keep the graph of a step, which takes its number, the states, what no step changes, and sizes, and returns the
    new states. The name is the same in every process: compiled code comes from caches, and calls the body by it.

    Args:
        gradients: of a step, for states and what is fixed of the dtypes of each call.
        autocast: the arguments of ``torch.autocast``, of the regions that a step runs in, the outermost first.
    """
    body = _Body(graph, gradients, autocast)
    name = hashlib.sha256(body.text.encode()).hexdigest()[:20]
    while not _bodies.setdefault(name, body).does_as(body):  # two functions of one name
        name += "+"
    return name


@opaque("counted_loop")
def counted_loop(
    body: str, steps: int, states: Sequence[Tensor], fixed: Sequence[Tensor], sizes: Sequence[int]
) -> list[Tensor]:
    """The states after steps 1 to ``steps`` - 1; step 0 is the caller's.

    Args:
        body: as ``add_body`` has named it. states: of step 0; of any shape and dtype, and dense.
        fixed: tensors that steps read. sizes: numbers that they read.

    Returns:
        As many as ``states``, of their shapes, dtypes and strides, in memory of their own.

    Gradient: as the steps have; they are run again for it. Operands that it is not computed from are not saved.
    """
    with outside_of_operators(), torch.no_grad():
        found = _run(body, steps, [state.clone() for state in states], fixed, sizes)
        return [torch.empty_like(state).copy_(value) for state, value in zip(states, found, strict=True)]


def _run(
    body: str, steps: int, states: Sequence[Tensor], fixed: Sequence[Tensor], sizes: Sequence[int]
) -> Sequence[Tensor]:
    step = _bodies[body]
    with contextlib.ExitStack() as regions:
        for arguments in step.autocast:
            regions.enter_context(torch.autocast(*arguments))
        for i in range(1, steps):
            states = step.graph(i, *states, *fixed, *sizes)
    return states


@counted_loop.register_fake
def _(body: str, steps: int, states: Sequence[Tensor], fixed: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return [torch.empty_like(state) for state in states]


@opaque("counted_loop_gradients")
def counted_loop_gradients(
    body: str,
    steps: int,
    gradients: Sequence[Tensor],
    ends: Sequence[int],
    states: Sequence[Tensor],
    fixed: Sequence[Tensor],
    sizes: Sequence[int],
    needed: Sequence[bool],
) -> list[Tensor]:
    """Of those of ``states`` and ``fixed`` that are ``needed``, contiguous.

    Args:
        gradients: of what :func:`counted_loop` returns, of ``ends``, by number.
    """
    with outside_of_operators(), torch.enable_grad():
        operands = [each.detach().requires_grad_(need) for each, need in zip([*states, *fixed], needed, strict=True)]
        # A step may write to a state, which no leaf of autograd allows.
        first = [state.clone() for state in operands[: len(states)]]
        found = _run(body, steps, first, operands[len(states) :], sizes)
        wanted = [each for each, need in zip(operands, needed, strict=True) if need]
        kept = [(found[i], each) for i, each in zip(ends, gradients, strict=True) if found[i].requires_grad]
        if not kept:  # of so few steps
            return [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in wanted]
        outputs, given = zip(*kept, strict=True)
        results = torch.autograd.grad(outputs, wanted, given, allow_unused=True, materialize_grads=True)
    return [each.detach().clone(memory_format=torch.contiguous_format) for each in results]


@counted_loop_gradients.register_fake
def _(
    body: str,
    steps: int,
    gradients: Sequence[Tensor],
    ends: Sequence[int],
    states: Sequence[Tensor],
    fixed: Sequence[Tensor],
    sizes: Sequence[int],
    needed: Sequence[bool],
) -> list[Tensor]:
    wanted = (each for each, need in zip([*states, *fixed], needed, strict=True) if need)
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.body, ctx.steps, states, fixed, ctx.sizes = inputs
    operands, ctx.count = [*states, *fixed], len(states)
    ctx.needed = [each.requires_grad for each in operands]
    gradients = _bodies[ctx.body].gradients
    differentiable, saved = gradients.differentiable(ctx.needed), gradients.saved(ctx.needed)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(end for i, end in enumerate(output) if i not in differentiable))
    ctx.save_for_backward(*(each for i, each in enumerate(operands) if i in saved))
    ctx.others = {
        i: (each.shape, each.stride(), each.dtype, each.device) for i, each in enumerate(operands) if i not in saved
    }


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    ends = [i for i, gradient in enumerate(gradients) if gradient is not None]
    given = _bodies[ctx.body].gradients.given(ends)
    needed = [need and i in given for i, need in enumerate(ctx.needed)]
    each: list[Tensor | None] = [None for _ in needed]
    if any(needed):
        saved = iter(ctx.saved_tensors)
        operands = [zeros(*ctx.others[i]) if i in ctx.others else next(saved) for i in range(len(needed))]
        states, fixed = operands[: ctx.count], operands[ctx.count :]
        with_gradients = [gradient for gradient in gradients if gradient is not None]
        found = iter(
            counted_loop_gradients(ctx.body, ctx.steps, with_gradients, ends, states, fixed, ctx.sizes, needed)
        )
        each = [next(found) if need else None for need in needed]
    return None, None, each[: ctx.count], each[ctx.count :], None if ctx.sizes else []


counted_loop.register_autograd(_backward, setup_context=_save)
