"""What operators take, from their sizes and from a device's rates: time, and memory of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

import glue_compiler.ops.offload  # noqa: F401  registers the copies
from glue_compiler.compat import symbols
from glue_compiler.fx.values import Symbolic, expression, most_bytes, tensors_in, value_of
from glue_compiler.ops.device_rates import Rates, Sized, measured_call

_COPIES = (
    torch.ops.glue.offload_start.default,
    torch.ops.glue.offload_wait.default,
    torch.ops.glue.reload_start.default,
    torch.ops.glue.reload_wait.default,
)


class Cost(NamedTuple):
    """``scratch``: bytes that an operator takes for itself while it runs, beside its results."""

    seconds: float
    scratch: int = 0


@dataclass(frozen=True)
class Costs:
    """What operators take on a device."""

    rates: Rates
    device: torch.device

    def of(self, node: fx.Node, shape_env: object) -> Cost:
        """A product or attention: measured where it can be run on its own, else by its formula, without scratch.
        Others: the time to read and write what they make, for what is fused reads about as much as it writes.

        An operator that no formula is known for counts as one that reads and writes all that it is given, twice. Copies
        to the host and back run beside the others, and take nothing.
        """
        if node.target in _COPIES:
            return Cost(0.0)
        made = sum(most_bytes(tensor, shape_env) or 0 for tensor in tensors_in(value_of(node)))
        if not is_kernel(node):
            return Cost(2 * made / self.rates.memory)
        shape = functools.partial(_shape, shape_env=shape_env)
        args, kwargs = tree_map(lambda a: value_of(a) if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
        if self.device.type == "cuda" and isinstance(node.target, torch._ops.OpOverload):
            sized, named = tree_map(
                lambda a: _sized(a, shape) if isinstance(a, torch.Tensor) else shape(a), (args, kwargs)
            )
            if (measured := measured_call(node.target, sized, named, self.device)) is not None:
                return Cost(measured.seconds, max(0, measured.allocated - made))
        read = sum(most_bytes(tensor, shape_env) or 0 for tensor in tensors_in((args, kwargs)))
        passes = (made + read) / self.rates.memory
        flops = _flops(node.target, shape(args), shape(kwargs), shape(value_of(node)))
        return Cost(2 * passes if flops is None else max(passes, flops / self.rates.flops))


def _sized(tensor: torch.Tensor, shape: Callable[[Any], Any]) -> Sized:
    return Sized(shape(tensor), tuple(shape(stride) for stride in tensor.stride()), tensor.dtype)


def is_kernel(node: fx.Node) -> bool:
    """Products, convolutions, attention, operators that are not torch's own or return several tensors: no compiler
    fuses those."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OperatorBase):
        return False
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims"):
        return node.target.overloadpacket in flop_registry or not isinstance(value_of(node), torch.Tensor)
    return True


def _flops(target: Any, args: Any, kwargs: Any, result: Any) -> float | None:
    """By torch's own formulas, of shapes; None where there is none, or it does not know these arguments."""
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is None:
        return None
    try:
        return float(formula(*args, **kwargs, out_val=result))
    except (TypeError, ValueError, AssertionError, IndexError):
        return None


def _shape(value: Any, shape_env: object) -> Any:
    """Sizes as numbers; formulas compare them, and symbols would get guards."""
    if isinstance(value, torch.Tensor):
        return tuple(_number(size, shape_env) for size in value.shape)
    if isinstance(value, tuple | list):
        return tuple(_shape(each, shape_env) for each in value)
    if isinstance(value, dict):
        return {name: _shape(each, shape_env) for name, each in value.items()}
    return _number(value, shape_env) if isinstance(value, Symbolic) else value


def _number(size: Any, shape_env: object) -> int:
    if isinstance(size, int):
        return size
    bound = symbols.upper_bound(expression(size), shape_env)
    return 1 if bound is None else bound
