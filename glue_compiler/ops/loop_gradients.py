"""What the gradients of a loop are computed from, as autograd tells of one step of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from glue_compiler.fx.call_observer import written_operands
from glue_compiler.fx.reachable import reachable
from glue_compiler.fx.values import storage_of, storages_of, tensors_in

_SIZES_ALONE = {
    getattr(torch.ops.aten, name).default
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}
"""Operators that read no number of their first operand."""


@dataclass(frozen=True)
class StepGradients:
    """Operands of a step are its states, and then what is fixed, by number.

    Attributes:
        read: for each state, the operands that its new value has gradients for → operands that these are computed from.
        made_of: for each state, the operands that its new value is computed from.
    """

    read: tuple[dict[int, tuple[int, ...]], ...]
    made_of: tuple[tuple[int, ...], ...]

    def given(self, states: Iterable[int]) -> set[int]:
        """The operands of the first step that the last values of ``states`` have gradients for."""
        return reachable(states, lambda i: self.read[i] if i < len(self.read) else ())

    def differentiable(self, needed: Sequence[bool]) -> set[int]:
        """The states whose last values have gradients for an operand that needs some."""
        return {i for i in range(len(self.read)) if any(needed[operand] for operand in self.given([i]))}

    def saved(self, needed: Sequence[bool]) -> set[int]:
        """The operands that gradients are computed from, where the steps run again for them."""
        passing = self.differentiable(needed) | {i for i, need in enumerate(needed) if need}
        at_once = {i for gradients in self.read for of, read in gradients.items() if of in passing for i in read}
        return reachable(at_once, lambda i: self.made_of[i] if i < len(self.made_of) else ())


def step_gradients(
    step: Callable[..., Sequence[Tensor]], states: Sequence[Tensor], fixed: Sequence[Tensor], sizes: Sequence[Any]
) -> StepGradients:
    """Runs ``step``, and autograd, on tensors like these, which may be fake."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        leaves = [_leaf(each) for each in (*states, *fixed)]
        with _Origins(leaves) as origins:
            # A step may write to a state, which no leaf of autograd allows.
            copies = [leaf.clone() for leaf in leaves[: len(states)]]
            made = step(1, *copies, *leaves[len(states) :], *sizes)
            made_of = tuple(map(origins.of, made))
            read = tuple(_read(each, leaves, origins) for each in made)
    return StepGradients(read, made_of)


def zeros(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stands for an operand where its numbers do not matter, but that they are numbers: they may be indices.

    Views of the operand are views of it: dense, it has dimensions in the same order.
    """
    return torch.zeros_like(torch.empty_strided(shape, strides, dtype=dtype, device=device))


def _leaf(like: Tensor) -> Tensor:
    leaf = zeros(like.shape, like.stride(), like.dtype, like.device)
    return leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())


def _read(made: Tensor, leaves: list[Tensor], origins: _Origins) -> dict[int, tuple[int, ...]]:
    if not made.requires_grad:
        return {}
    able = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    wanted = [leaves[i] for i in able]
    found = torch.autograd.grad(made, wanted, torch.empty_like(made), retain_graph=True, allow_unused=True)
    return {i: origins.of(gradient) for i, gradient in zip(able, found, strict=True) if gradient is not None}


class _Origins(TorchDispatchMode):
    """Knows from which of ``leaves`` the numbers in a piece of memory come."""

    supports_higher_order_operators = True

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self._found = {storage_of(leaf): {i} for i, leaf in enumerate(leaves)}
        self._alive: list[Any] = list(leaves)

    def of(self, tensor: Tensor) -> tuple[int, ...]:
        """
        Raises:
            KeyError: no operator was seen that made it.
        """
        return tuple(sorted(self._found[storage_of(tensor)]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._alive.append(result)
        read = storages_of([args[1:] if func in _SIZES_ALONE else args, kwargs])
        origins = set[int]().union(*(self._found.get(each, ()) for each in read))
        # Of a higher-order operator no schema tells what it writes.
        is_known = isinstance(func, torch._ops.OpOverload)
        written = written_operands(func, args, kwargs) if is_known else [args, kwargs]
        for tensor in tensors_in([result, written]):
            self._found.setdefault(storage_of(tensor), set()).update(origins)
        return result
