"""A large card as a smaller one: what processes that start later may take of its memory."""

from __future__ import annotations

import os

import torch

from glue_compiler.errors import GlueOptionError
from glue_compiler.options import parse_bytes


def allocator_settings(card: str | None) -> str:
    """For ``PYTORCH_CUDA_ALLOC_CONF``: the user's own, or blocks that grow; with ``card`` no more than such a card has.

    Args:
        card: bytes, such as ``"24GiB"``; kernels and their speed stay those of the card that is here.

    Raises:
        GlueOptionError: there is no CUDA card, or it has less.
    """
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if card is None:
        return settings
    if not torch.cuda.is_available():
        raise GlueOptionError("--card is for a CUDA card, of which there is none here")
    total = torch.cuda.get_device_properties(0).total_memory
    wanted = parse_bytes(card)
    if wanted > total:
        raise GlueOptionError(f"--card {card}: the card here has {total} bytes")
    return f"{settings},per_process_memory_fraction:{wanted / total:.4f}"
