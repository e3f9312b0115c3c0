"""``memory_budget`` in bytes: a share of the card, or ``"auto"``, become a number when a graph is compiled."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from glue_compiler.compat import storages
from glue_compiler.errors import GlueWarning
from glue_compiler.fx.values import is_plain
from glue_compiler.ops.device_memory import DeviceMemory, memory_of
from glue_compiler.options import GlueOptions

MARGIN = 0.05
"""The share of the card that ``"auto"`` leaves for what no graph shows: workspaces, and holes between tensors."""
GRAIN = 2**28
"""``"auto"`` is a multiple of it, so that what was compiled in one process may serve the next."""


def in_bytes(options: GlueOptions, inputs: Sequence[Any]) -> GlueOptions:
    """The options with a ``memory_budget`` that is a number of bytes, or None.

    Args:
        inputs: the graph's, with its parameters; their device is asked.
    """
    budget = options.memory_budget
    if budget is None or isinstance(budget, int):
        return options
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    memory = memory_of(device)
    if memory is None:
        warnings.warn(
            f"glue: memory_budget={budget!r} is about the memory of a CUDA device, and a graph computes on '{device}': "
            "it is compiled without a budget. A number of bytes, such as '24GiB', holds for any device",
            GlueWarning,
            stacklevel=2,
        )
        return dataclasses.replace(options, memory_budget=None)
    # What the inputs hold already counts in a step's peak.
    found = limit_of(budget, memory, _bytes_of(tensors))
    return dataclasses.replace(options, memory_budget=found // GRAIN * GRAIN if budget == "auto" else found)


def limit_of(budget: float | str, memory: DeviceMemory, held: int) -> int:
    """What a step may take of a device: a share, or for ``"auto"`` what is free, with what it has ``held`` so far."""
    if budget != "auto":
        return int(float(budget) * memory.total)
    return max(0, memory.free + memory.unused + held - int(MARGIN * memory.total))


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Of memory on a device, each piece once; those of unknown size are left out, which makes the budget smaller."""
    found = {
        storages.identity(tensor): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if is_plain(tensor) and tensor.device.type != "cpu"
    }
    return sum(nbytes for nbytes in found.values() if isinstance(nbytes, int))
