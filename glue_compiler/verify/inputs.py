"""Copies of a call's inputs, so that a graph can run again without a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from glue_compiler.fx.values import is_plain, storage_of


class CannotCopy(Exception):
    """An input that cannot be copied so that a graph sees no difference; says why."""


@dataclass(frozen=True)
class _Look:
    """How an input looks at its memory. ``is_memory``: it is the memory's own tensor, and no view of it."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_memory: bool
    requires_grad: bool
    is_leaf: bool


@dataclass(frozen=True)
class Inputs:
    """A call's inputs as they were: each tensor's memory once, and how each input looks at it.

    Attributes:
        memories: tensors without history.
        looks: for each input how it looks at one of them, or the value of an input that is no tensor.
    """

    memories: tuple[torch.Tensor, ...]
    looks: tuple[Any, ...]

    def arguments(self, dtype: torch.dtype | None = None) -> tuple[list[Any], dict[int, torch.Tensor]]:
        """Arguments for one call, in memory of their own; and the leaves that their gradients go to, by memory.

        Args:
            dtype: convert floating-point memory to it.
        """
        looks = [look for look in self.looks if isinstance(look, _Look)]
        needed = {look.memory for look in looks if look.requires_grad}
        times_used = Counter(look.memory for look in looks)
        bases: dict[int, torch.Tensor] = {}
        leaves: dict[int, torch.Tensor] = {}
        for number, memory in enumerate(self.memories):
            bases[number] = copy_of(memory, dtype if dtype is not None and memory.is_floating_point() else memory.dtype)
            if number in needed:
                leaves[number] = bases[number].requires_grad_()
        for look in looks:
            # In-place operators refuse leaves, and views of them.
            is_plain_leaf = look.is_memory and look.is_leaf and times_used[look.memory] == 1
            if look.memory in leaves and bases[look.memory] is leaves[look.memory] and not is_plain_leaf:
                bases[look.memory] = _Through.apply(leaves[look.memory])
        return [self._argument(look, bases) for look in self.looks], leaves

    @staticmethod
    def _argument(look: Any, bases: dict[int, torch.Tensor]) -> Any:
        if not isinstance(look, _Look):
            return look
        base = bases[look.memory]
        argument = base if look.is_memory else base.as_strided(look.size, look.stride, look.offset)
        return argument if look.requires_grad == argument.requires_grad else argument.detach()

    def readers_of(self, memory: int) -> list[int]:
        """The positions of the inputs that look at one memory."""
        return [i for i, look in enumerate(self.looks) if isinstance(look, _Look) and look.memory == memory]

    def is_still(self, position: int, value: Any) -> bool:
        """Does input ``position``, which is ``value`` now, hold what it held?"""
        look = self.looks[position]
        if not isinstance(look, _Look):
            return True
        before = self.memories[look.memory].as_strided(look.size, look.stride, look.offset)
        return torch.equal(before, value.detach())


class _Through(torch.autograd.Function):
    """A copy of the same layout, for an input that autograd takes for the result of an operator."""

    @staticmethod
    def forward(ctx: Any, memory: torch.Tensor) -> torch.Tensor:
        return copy_of(memory, memory.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


def record_inputs(inputs: Sequence[Any]) -> Inputs:
    """Copy what ``inputs`` hold now.

    Raises:
        CannotCopy: for a tensor subclass, a tensor inside of a transform, or one memory read as two dtypes.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    together: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            raise CannotCopy(f"an input is a {type(tensor).__name__} that is not plain memory")
        together.setdefault(storage_of(tensor), []).append(tensor)
    if any(len({tensor.dtype for tensor in group}) > 1 for group in together.values()):
        raise CannotCopy("one memory is read as two dtypes")
    bases = {storage: _common_base(group) for storage, group in together.items()}
    memories: dict[int, tuple[int, torch.Tensor]] = {}
    looks: list[Any] = []
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            looks.append(value)
            continue
        base = bases[storage_of(value)]
        number, _ = memories.setdefault(storage_of(value), (len(memories), copy_of(base, base.dtype)))
        offset = int(value.storage_offset() - base.storage_offset())
        size, stride = tuple(value.shape), tuple(value.stride())
        looks.append(_Look(number, size, stride, offset, base is value, value.requires_grad, value.is_leaf))
    return Inputs(tuple(memory for _, memory in memories.values()), tuple(looks))


def _common_base(group: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that all others are views of; without one, the memory as one row."""
    base = _base(group[0])
    if all(_base(tensor) is base and _covers(base, tensor) for tensor in group):
        return base
    return _row(group[0])


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._base if tensor._base is not None else tensor


def _span(tensor: torch.Tensor) -> int:
    """Elements of memory from the tensor's first to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0


def _covers(base: torch.Tensor, view: torch.Tensor) -> bool:
    start = view.storage_offset() - base.storage_offset()
    return base is view or (base.dtype == view.dtype and start >= 0 and start + _span(view) <= _span(base))


def _row(tensor: torch.Tensor) -> torch.Tensor:
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)


def copy_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A leaf of the same sizes and strides in memory of its own; elements that share memory go on sharing it."""
    with torch.no_grad():
        row = tensor.detach().as_strided((_span(tensor),), (1,)).to(dtype, copy=True)
        return torch.empty(0, dtype=dtype, device=tensor.device).set_(
            row.untyped_storage(), 0, tensor.shape, tensor.stride()
        )
