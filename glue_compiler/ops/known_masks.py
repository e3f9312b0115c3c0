"""What is known of masks in memory: compiled code that makes one says what it shows, code that is handed it asks.

What is said goes with the tensor, as an object, and lives as long. It holds while the version counter, the place and
the sizes of the tensor are what they were. Views and copies are other tensors, of which nothing is known. As in
``batch_memo``, what writes past the version counter is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from glue_compiler.compat import symbols
from glue_compiler.fx.values import expressions, is_plain
from glue_compiler.ops.opaque import opaque


@dataclass(frozen=True)
class MaskKind:
    """Which keys a mask ``[..., T, T]`` shows to a query: those that pass every condition.

    Attributes:
        has_documents: key and query belong to one document, a run of tokens: :func:`mask_documents` says which.
        is_causal: ``k <= q``.
        window: -1: any distance; else ``|q - k| < window``.
        hidden: what a mask that is added to the scores holds for other keys, and 0 for these; None: it is boolean.
    """

    has_documents: bool
    is_causal: bool
    window: int
    hidden: float | None = None


@dataclass(frozen=True)
class _Known:
    kind: MaskKind
    state: tuple[Any, ...]


def may_be_mask(tensor: Any) -> bool:
    """By its dtype and its sizes: of as many queries as keys; of what is added to scores, for all heads alike."""
    if not isinstance(tensor, Tensor) or not is_plain(tensor):
        return False
    sizes = expressions(tensor.shape)
    if tensor.dtype != torch.bool:
        is_added = tensor.is_floating_point() and not tensor.requires_grad
        if not is_added or len(sizes) != 4 or sizes[1] != 1:
            return False
    return 2 <= len(sizes) <= 4 and sizes[-1] == sizes[-2] and sizes[-1] != 1


KNOWN = "known_mask"
"""In the ``meta`` of inputs of a graph that may be masks: what is known of those of this call, or None."""

_known: Any = WeakTensorKeyDictionary()


def remember(mask: Any, kind: MaskKind) -> None:
    """``mask`` shows what ``kind`` says. Nothing is kept of what is no plain tensor with a version counter."""
    if type(mask) is Tensor and not mask.is_inference() and not symbols.is_functorch_wrapped(mask):
        _known[mask] = _Known(kind, _state_of(mask))


def kind_of(mask: Any) -> MaskKind | None:
    """What is known of ``mask``, any object, as it is now; None: nothing."""
    known = _known.get(mask) if type(mask) is Tensor else None
    if known is None:
        return None
    try:
        return known.kind if known.state == _state_of(mask) else None
    except RuntimeError:  # its memory is gone, as that of an earlier replay of a CUDA graph
        return None


def _state_of(mask: Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():  # no mode of the caller's looks at the questions below
        return mask._version, mask.data_ptr(), mask.shape, mask.stride()


@opaque("mask_documents")
def mask_documents(mask: Tensor) -> Tensor:
    """Numbers of the documents of a mask that has them. No host synchronisation.

    Args:
        mask: ``[T, T]``, ``[H, T, T]`` or ``[B, H, T, T]``, the same for all heads, of a kind with documents: a token
            that does not see the one before it begins one. Bool, or floats that are 0 where a key is shown.

    Returns:
        int64 ``[T]``, or ``[B, T]`` for each row, ascending from 0.
    """
    of_rows = mask.select(-3, 0) if mask.dim() > 2 else mask
    before = of_rows.diagonal(-1, -2, -1)
    begins = before.logical_not() if mask.dtype == torch.bool else before != 0
    return torch.nn.functional.pad(begins.to(torch.int64), (1, 0)).cumsum(-1)


@mask_documents.register_fake
def _(mask: Tensor) -> Tensor:
    return mask.new_empty((*mask.shape[:-3], mask.shape[-1]), dtype=torch.int64)
