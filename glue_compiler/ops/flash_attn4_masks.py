"""How FlashAttention 4 reads a boolean mask; imported where its package is installed alone."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from flash_attn.cute.utils import scalar_to_ssa


@cute.jit
def is_shown(batch: Any, head: Any, query: Any, key: Any, lengths: Any, tensors: Any) -> Any:
    """For a mask that shows keys: uint8 ``[B, H, Q, K]``."""
    return scalar_to_ssa(tensors[0][batch[0], head[0], query[0], key[0]] != 0, cutlass.Boolean)


@cute.jit
def is_not_hidden(batch: Any, head: Any, query: Any, key: Any, lengths: Any, tensors: Any) -> Any:
    """For a mask that hides keys: uint8 ``[B, H, Q, K]``."""
    return scalar_to_ssa(tensors[0][batch[0], head[0], query[0], key[0]] == 0, cutlass.Boolean)
