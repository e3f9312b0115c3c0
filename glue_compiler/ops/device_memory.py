"""How much memory a device has, and how much of it is free."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes. ``free``: that no process holds; ``unused``: that this process holds, and no tensor lies in."""

    total: int
    free: int
    unused: int


def memory_of(device: torch.device) -> DeviceMemory | None:
    """None for devices other than CUDA ones."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(total, free, unused)
