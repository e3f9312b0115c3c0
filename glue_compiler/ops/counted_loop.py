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
from glue_compiler.ops.opaque import opaque

Autocast = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class _Body:
    graph: fx.GraphModule
    autocast: Autocast

    @property
    def text(self) -> str:
        return f"{self.graph.code}\n{self.autocast}"

    def does_as(self, other: _Body) -> bool:
        targets = [[node.target for node in each.graph.graph.nodes] for each in (self, other)]
        return self.text == other.text and targets[0] == targets[1]


_bodies: dict[str, _Body] = {}


def add_body(graph: fx.GraphModule, autocast: Autocast = ()) -> str:
    """Keep the graph of a step, which takes its number, the states, what no step changes, and sizes, and returns the
    new states. The name is the same in every process: compiled code comes from caches, and calls the body by it.

    Args:
        autocast: the arguments of ``torch.autocast``, of the regions that a step runs in, the outermost first.
    """
    body = _Body(graph, autocast)
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

    Gradient: of floating ``states`` and ``fixed``; the steps are run again for it.
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
    states: Sequence[Tensor],
    fixed: Sequence[Tensor],
    sizes: Sequence[int],
    needed: Sequence[bool],
) -> list[Tensor]:
    """Of those of ``states`` and ``fixed`` that are ``needed``, contiguous.

    Args:
        gradients: of the states that :func:`counted_loop` returns, one for each that is floating.
    """
    with outside_of_operators(), torch.enable_grad():
        operands = [each.detach().requires_grad_(need) for each, need in zip([*states, *fixed], needed, strict=True)]
        # A step may write to a state, which no leaf of autograd allows.
        first = [state.clone() for state in operands[: len(states)]]
        found = _run(body, steps, first, operands[len(states) :], sizes)
        ends = zip([each for each in found if each.is_floating_point()], gradients, strict=True)
        kept = [(end, gradient) for end, gradient in ends if end.requires_grad]
        wanted = [each for each, need in zip(operands, needed, strict=True) if need]
        if not kept or not wanted:
            return [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in wanted]
        outputs, given = zip(*kept, strict=True)
        results = torch.autograd.grad(outputs, wanted, given, allow_unused=True, materialize_grads=True)
    return [each.detach().clone(memory_format=torch.contiguous_format) for each in results]


@counted_loop_gradients.register_fake
def _(
    body: str,
    steps: int,
    gradients: Sequence[Tensor],
    states: Sequence[Tensor],
    fixed: Sequence[Tensor],
    sizes: Sequence[int],
    needed: Sequence[bool],
) -> list[Tensor]:
    wanted = (each for each, need in zip([*states, *fixed], needed, strict=True) if need)
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.body, ctx.steps, states, fixed, ctx.sizes = inputs
    ctx.count = len(states)
    ctx.needed = [each.requires_grad for each in (*states, *fixed)]
    ctx.save_for_backward(*states, *fixed)


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    operands = ctx.saved_tensors
    states, fixed = list(operands[: ctx.count]), list(operands[ctx.count :])
    given = [
        torch.zeros_like(state) if gradient is None else gradient
        for state, gradient in zip(states, gradients, strict=True)
        if state.is_floating_point()
    ]
    found = iter(counted_loop_gradients(ctx.body, ctx.steps, given, states, fixed, ctx.sizes, ctx.needed))
    each = [next(found) if need else None for need in ctx.needed]
    return None, None, each[: ctx.count], each[ctx.count :], None if ctx.sizes else []


counted_loop.register_autograd(_backward, setup_context=_save)
