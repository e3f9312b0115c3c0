"""A table on the device of where separate tensors start, for kernels that read many tensors of one shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from glue_compiler.ops.page_locked import locked_copy


def address_table(tensors: Sequence[Tensor]) -> Tensor:
    """int64 ``[len(tensors)]`` on the tensors' device: the address of each. Made without a host synchronisation."""
    device = tensors[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _copied(tuple(tensor.data_ptr() for tensor in tensors), device, stream)[0]


@functools.lru_cache(maxsize=1024)
def _copied(addresses: tuple[int, ...], device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """The table on the device and its pinned source, kept alive for a graph capture that replays the copy.

    A table holds nothing but its own key, so an entry can never be stale; ``stream`` is part of the key because the
    copy is ordered on the stream that made it.
    """
    host = torch.tensor(addresses, dtype=torch.int64)
    if device.type == "cuda":
        host = locked_copy(host)
    return host.to(device, non_blocking=True), host
