"""How much memory a device has, and how much of it is free."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes. ``total`` and ``free`` of what this process may hold; ``unused``: what it holds, and no tensor lies in."""

    total: int
    free: int
    unused: int


@functools.cache
def size_of(device: torch.device) -> int | None:
    """Bytes of a device's memory that this process may hold; None: it is not known here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def memory_of(device: torch.device) -> DeviceMemory | None:
    """None for devices other than CUDA ones."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    total = int(total * torch.cuda.get_per_process_memory_fraction(device))
    unused = reserved - torch.cuda.memory_allocated(device)
    return DeviceMemory(total, max(0, min(free, total - reserved)), unused)
