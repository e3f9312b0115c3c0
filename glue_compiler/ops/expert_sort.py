"""Stable counting sort of routed slots by expert: the one sort that a group of experts needs."""

from __future__ import annotations

import torch
from torch import Tensor

from glue_compiler.ops.kernel_support import runs_triton
from glue_compiler.ops.opaque import opaque


@opaque("expert_sort")
def expert_sort(expert_ids: Tensor, num_experts: int, k_major: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stable counting sort of routed slots by expert.

    A *slot* is one (token, position) pair; its number is always ``token * top_k + position``, so the token of a slot is
    ``slot // top_k``. A *row* is a slot's place after sorting: rows of expert 0 first, then of expert 1, and so on.
    ``k_major`` only chooses the order of the rows *within* one expert.

    Args:
        expert_ids: int32/int64 ``[tokens, top_k]``, or ``[tokens]`` for ``top_k = 1``, any strides. Ids outside
            ``[0, num_experts)`` (sentinels, negative ids) sort last, in the same order, and belong to no expert.
        num_experts: number of experts E, a Python int.
        k_major: True: rows of one expert are ordered by (position, token), which is the order of
            ``torch.where(mask[e])`` with a ``[top_k, tokens]`` mask, that is of
            ``argsort(expert_ids.t().reshape(-1), stable=True)``. False: by (token, position).

    Returns:
        ``order`` int32 ``[slots]``: slot of the i-th row; ``inverse`` int32 ``[slots]``: row of the i-th slot;
        ``counts`` int32 ``[E]``; ``offsets`` int32 ``[E]``: inclusive cumulative counts, so expert e owns the rows
        ``offsets[e] - counts[e] : offsets[e]`` and the rows from ``offsets[-1]`` on belong to no expert.
        Everything stays on the device: no host synchronisation. Two runs are bitwise equal.

    Raises:
        ValueError: ``num_experts < 1``, ids not int32/int64, more than two dimensions, or 2**31 slots and more.

    Source: counting sort (Knuth, The Art of Computer Programming vol. 3, 5.2, algorithm D): on CUDA a histogram per
    block of slots, one exclusive scan in (expert, block) order, and a placement by rank within the block.
    """
    _check(expert_ids, num_experts)
    if expert_ids.dim() == 1:
        expert_ids = expert_ids.unsqueeze(1)
    if expert_ids.numel() == 0:
        return _empty(expert_ids, num_experts, zeroed=True)
    if runs_triton(expert_ids):
        from glue_compiler.ops import expert_sort_triton

        return expert_sort_triton.sort(expert_ids, num_experts, k_major)
    return _reference(expert_ids, num_experts, k_major)


@expert_sort.register_fake
def _(expert_ids: Tensor, num_experts: int, k_major: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(expert_ids, num_experts)
    return _empty(expert_ids, num_experts, zeroed=False)


def _check(expert_ids: Tensor, num_experts: int) -> None:
    if num_experts < 1:
        raise ValueError(f"expert_sort: num_experts must be at least 1, got {num_experts}")
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert_sort: expert_ids must be int32 or int64, got {expert_ids.dtype}")
    if expert_ids.dim() not in (1, 2):
        raise ValueError(f"expert_sort: expert_ids must be [tokens, top_k] or [tokens], got {expert_ids.dim()} dims")
    if isinstance(expert_ids.numel(), int) and expert_ids.numel() >= 2**31:
        raise ValueError(f"expert_sort: {expert_ids.numel()} slots do not fit into int32")


def _empty(expert_ids: Tensor, num_experts: int, *, zeroed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def make(size: int) -> Tensor:
        new = expert_ids.new_zeros if zeroed else expert_ids.new_empty
        return new(size, dtype=torch.int32)

    slots = expert_ids.numel()
    return make(slots), make(slots), make(num_experts), make(num_experts)


def _reference(expert_ids: Tensor, num_experts: int, k_major: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, top_k = expert_ids.shape
    belongs = (expert_ids >= 0) & (expert_ids < num_experts)
    keys = torch.where(belongs, expert_ids, num_experts)
    if k_major:
        walk = keys.t().reshape(-1).argsort(stable=True)
        order = walk % tokens * top_k + walk // tokens
    else:
        order = keys.reshape(-1).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    # A comparison sum, since CUDA's bincount reads its result's size back to the host.
    experts = torch.arange(num_experts, device=keys.device)
    counts = (
        (keys.reshape(-1, 1) == experts).sum(0)
        if keys.is_cuda
        else torch.bincount(keys.reshape(-1), minlength=num_experts + 1)[:num_experts]
    )
    return order.int(), inverse.int(), counts.int(), counts.cumsum(0).int()
