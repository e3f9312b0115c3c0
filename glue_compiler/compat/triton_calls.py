"""Triton kernels that Inductor launches, as it does those that a user's program calls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx


def call_in_graph(
    make: Callable[..., fx.Node],
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: dict[str, fx.Node],
    constants: dict[str, Any],
    written: str,
) -> fx.Node:
    """What ``kernel`` writes to its argument ``written``, and to no other.

    Args:
        make: makes the node of a call: (target, *args, **kwargs).
        kernel: of ``triton.jit``.
        tensors: its arguments that are tensors, by name. constants: the others.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    call = make(
        triton_kernel_wrapper_functional,
        kernel_idx=kernel_side_table.add_kernel(kernel),
        constant_args_idx=kernel_side_table.add_constant_args(constants),
        grid=[grid],
        tma_descriptor_metadata={},
        kwargs=tensors,
        tensors_to_clone=[written],
    )
    return make(operator.getitem, call, written)
