"""How fast a device copies from the host's memory."""

from __future__ import annotations

import functools
import itertools

import torch

from glue_compiler.compat.wrapper_tensors import out_of_modes
from glue_compiler.ops.page_locked import locked_copy

_NBYTES = 2**26


@functools.cache
def link_rate(device: torch.device) -> float:
    """Bytes a second between a CUDA device and the host: the best of three copies, behind one that warms up."""
    with out_of_modes(), torch.no_grad(), torch.cuda.device(device):
        host = locked_copy(torch.empty(_NBYTES, dtype=torch.uint8))
        there = torch.empty(_NBYTES, device=device, dtype=torch.uint8)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        for mark in marks:
            there.copy_(host, non_blocking=True)
            mark.record()
        marks[-1].synchronize()
        milliseconds = min(start.elapsed_time(end) for start, end in itertools.pairwise(marks))
    return 1e3 * _NBYTES / milliseconds
