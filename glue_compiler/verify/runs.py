"""Runs a graph forward and backward on copies of a call's inputs, as it is or in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.switches import AUTOCAST_SWITCHES, modes_restored
from glue_compiler.fx import bodies
from glue_compiler.fx.values import tensors_in
from glue_compiler.verify.compare import Named
from glue_compiler.verify.inputs import Inputs


@dataclass(frozen=True)
class Results:
    """What one run gave: ``forward`` the outputs, then the inputs as they are after the call; ``gradients``."""

    forward: tuple[Named, ...]
    gradients: tuple[Named, ...]


def run(
    call: Callable[..., Any],
    inputs: Inputs,
    names: Sequence[str],
    *,
    gradients: bool,
    dtype: torch.dtype | None = None,
    shared: dict[int, Any] | None = None,
) -> Results:
    """Call ``call`` on copies of ``inputs``; then backward, for the same random gradients of the outputs each time.

    Args:
        names: of the inputs.
        gradients: run backward too, if an output needs it.
        dtype: convert floating-point inputs to it.
        shared: arguments to hand over as they are in place of copies, by position.
    """
    arguments, leaves = inputs.arguments(dtype)
    for position, value in (shared or {}).items():
        arguments[position] = value
    versions = [_version(argument) for argument in arguments]
    with modes_restored():
        outputs = as_tuple(call(*arguments))
    forward = forward_results(outputs, arguments, names)
    if not gradients or not leaves:
        return Results(forward, ())
    written = [a for a, version in zip(arguments, versions, strict=True) if _version(a) != version]
    ends = [end for end in (*outputs, *written) if isinstance(end, torch.Tensor) and end.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if ends:
        # Backward runs outside of the autocast that forward may be called in.
        with torch.autocast(ends[0].device.type, enabled=False):
            found = torch.autograd.grad(ends, list(leaves.values()), _directions(ends), allow_unused=True)
    labels = (
        "gradient of " + " and ".join(f"input {names[i]}" for i in inputs.readers_of(memory)) for memory in leaves
    )
    return Results(forward, tuple(map(Named, labels, found)))


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def forward_results(outputs: Sequence[Any], arguments: Sequence[Any], names: Sequence[str]) -> tuple[Named, ...]:
    """Values of now: without history, and not changed by what is written later."""
    now = [Named(f"output {i}", _now(value)) for i, value in enumerate(outputs)]
    after = [Named(f"input {n} after the call", _now(a)) for n, a in zip(names, arguments, strict=True)]
    return (*now, *after)


def _now(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _version(argument: Any) -> int:
    return argument._version if isinstance(argument, torch.Tensor) and not argument.is_inference() else 0


def _directions(ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Random gradients: a constant loss, such as the mean of a normalised tensor, has gradients of pure noise."""
    generator = torch.Generator().manual_seed(0)
    # In fp32, whatever the default is: an fp64 run must get the same ones.
    drawn = [torch.randn(end.shape, generator=generator, dtype=torch.float32) for end in ends]
    return [direction.to(end.device, end.dtype) for direction, end in zip(drawn, ends, strict=True)]


def eager_reference(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm``, a graph of our own, so that it runs eagerly as the user's program would: with its checkpoints."""
    for module in bodies.graph_modules(gm):
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is bodies.CHECKPOINT:
                node.target = checkpoint_body
                node.kwargs = {}
        module.recompile()
    return gm


def checkpoint_body(body: Callable[..., Any], *args: Any) -> Any:
    """What ``tag_activation_checkpoint`` stands for. (Called eagerly, it would not keep the random state.)"""
    return torch.utils.checkpoint.checkpoint(body, *args, use_reentrant=False)


_IN_FP64 = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    torch.complex64: torch.complex128,
}
_TO_A_DTYPE = ("float", "half", "bfloat16")


class InFp64(fx.Interpreter):
    """Runs a captured graph with every floating-point dtype replaced by fp64, outside of autocast."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in AUTOCAST_SWITCHES:
            return None
        return super().call_function(target, *_in_fp64((args, kwargs)))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_method("double" if target in _TO_A_DTYPE else target, *_in_fp64((args, kwargs)))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, fx.GraphModule):
            return lambda *operands: InFp64(value).run(*operands)
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _in_fp64(value: Any) -> Any:
    return fx.node.map_aggregate(value, lambda x: _IN_FP64.get(x, x) if isinstance(x, torch.dtype) else x)


@contextmanager
def fp64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def random_state(of: Sequence[Any], states: tuple[Any, ...] | None = None) -> Iterator[None]:
    """Start from ``states`` (of the random generators now, when None), and put back those of now in the end.

    Args:
        of: the values whose devices matter.
    """
    devices = _cuda_devices(of)
    with torch.random.fork_rng(devices):
        if states is not None:
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
        yield


def random_states(of: Sequence[Any]) -> tuple[Any, ...]:
    """Of the random generators now."""
    return (torch.get_rng_state(), *map(torch.cuda.get_rng_state, _cuda_devices(of)))


def _cuda_devices(of: Sequence[Any]) -> list[int]:
    return sorted({t.device.index for t in tensors_in(list(of)) if t.device.type == "cuda"})
