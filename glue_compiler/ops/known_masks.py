"""What is known of masks in memory: compiled code that makes one says what it shows, code that is handed it asks.

So does code whose results are zeros for tokens that a mask hides, and code that is handed those.

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
        has_padding: the key is one that any query sees, itself too: :func:`seen_of` says which are.
        is_causal: ``k <= q``.
        window: -1: any distance; else ``|q - k| < window``.
        hidden: what a mask that is added to the scores holds for other keys, and 0 for these; None: it is boolean.
    """

    has_documents: bool
    is_causal: bool
    window: int
    hidden: float | None = None
    has_padding: bool = False


class Padding:
    """Which tokens of a batch are none. Masks that one graph makes of one condition share it.

    Attributes:
        seen: bool ``[B, T]``: those that are no padding; None as long as nobody has asked.
    """

    def __init__(self) -> None:
        self.seen: Tensor | None = None


@dataclass(frozen=True)
class _Known:
    kind: MaskKind
    state: tuple[Any, ...]
    padding: Padding


def may_be_mask(tensor: Any) -> bool:
    """By its dtype and its sizes: of as many queries as keys, or, for rows ``[B, 1, T, T']``, of numbers that are known
    when it is made; of what is added to scores, for all heads alike."""
    if not isinstance(tensor, Tensor) or not is_plain(tensor):
        return False
    sizes = expressions(tensor.shape)
    if tensor.dtype != torch.bool:
        is_added = tensor.is_floating_point() and not tensor.requires_grad
        if not is_added or len(sizes) != 4 or sizes[1] != 1:
            return False
    if not 2 <= len(sizes) <= 4 or 1 in sizes[-2:]:
        return False
    may_be_equal = len(sizes) == 4 and not all(isinstance(size, int) or size.is_number for size in sizes[-2:])
    return bool(sizes[-1] == sizes[-2]) or may_be_equal


def may_be_tokens(tensor: Any) -> bool:
    """``[B, T, ...]``, by its dtype and its sizes."""
    is_floating = type(tensor) is Tensor and is_plain(tensor) and tensor.is_floating_point()
    return is_floating and tensor.dim() >= 3


PADDING = "padding"
"""In the ``meta`` of inputs with ``SEEN``: a number for the padding of this call, equal where it is the same one."""
KNOWN = "known_mask"
"""In the ``meta`` of inputs of a graph that may be masks: what is known of those of this call, or None."""
SEEN = "seen_tokens"
"""In the ``meta`` of masks with padding, and of inputs that may be tokens: the input, bool ``[B, T]``, that says which
tokens are no padding; None where nothing is known of those of this call."""

_known: Any = WeakTensorKeyDictionary()
_masked: Any = WeakTensorKeyDictionary()


def remember(mask: Any, kind: MaskKind, padding: Padding | None = None) -> None:
    """``mask`` shows what ``kind`` says. Nothing is kept of what is no plain tensor with a version counter, or has more
    keys than queries, or fewer."""
    if _has_versions(mask) and mask.shape[-1] == mask.shape[-2]:
        _known[mask] = _Known(kind, _state_of(mask), padding or Padding())


def kind_of(mask: Any) -> MaskKind | None:
    """What is known of ``mask``, any object, as it is now; None: nothing."""
    known = _known.get(mask) if type(mask) is Tensor else None
    return known.kind if known is not None and _is_as(known.state, mask) else None


def lengths_with_documents() -> set[int]:
    """Numbers of tokens of masks that are in memory and keep documents apart."""
    return {mask.shape[-1] for mask in list(_known) if (kind := kind_of(mask)) is not None and kind.has_documents}


def remember_tokens(tokens: Any, source: Any) -> None:
    """``tokens`` ``[B, T, ...]`` are zeros where a mask with padding, or what others are zeros for, hides them."""
    mask = _mask_behind(source)
    if mask is not None and _has_versions(tokens):
        _masked[tokens] = (mask, _state_of(tokens))


def mask_of(tokens: Any) -> Tensor | None:
    """The mask with padding that hides tokens for which ``tokens``, any object, has zeros; None: none is known."""
    mask, state = _masked.get(tokens, (None, None)) if type(tokens) is Tensor else (None, None)
    return mask if _is_as(state, tokens) and kind_of(mask) is not None else None


def _mask_behind(source: Any) -> Tensor | None:
    return source if kind_of(source) is not None else mask_of(source)


def padding_of(source: Any) -> Padding | None:
    """Of a mask that is known, or of zeros for what one hides; None of anything else."""
    mask = _mask_behind(source)
    return None if mask is None else _known[mask].padding


def knows_padding(source: Any) -> bool:
    """Is it a mask ``[B, 1, T, T]`` with padding, or zeros for what such a one hides?"""
    kind = kind_of(source)
    return kind.has_padding if kind is not None else mask_of(source) is not None


def seen_of(source: Tensor) -> Tensor:
    """bool ``[B, T]``: which tokens are no padding, by what :func:`knows_padding`.

    One tensor for all that a mask is known of, so that a batch's metadata is computed once.
    """
    mask = _mask_behind(source)
    assert mask is not None  # a guard has asked
    padding = _known[mask].padding
    if padding.seen is None:
        with torch.inference_mode(False):  # a later call may train
            padding.seen = _shown(mask, 0).clone()
    seen = padding.seen
    return seen if source is mask or len(seen) == len(source) else seen.expand(len(source), -1).contiguous()


def _has_versions(tensor: Any) -> bool:
    return type(tensor) is Tensor and not tensor.is_inference() and not symbols.is_functorch_wrapped(tensor)


def _is_as(state: tuple[Any, ...] | None, tensor: Tensor) -> bool:
    """Is it what it was when ``state`` was taken of it? None: of nothing."""
    try:
        return state is not None and state == _state_of(tensor)
    except RuntimeError:  # its memory is gone, as that of an earlier replay of a CUDA graph
        return False


def _state_of(mask: Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():  # no mode of the caller's looks at the questions below
        return mask._version, mask.data_ptr(), mask.shape, mask.stride()


@opaque("mask_documents")
def mask_documents(mask: Tensor) -> Tensor:
    """Numbers of the documents of a mask that has them. No host synchronisation.

    Args:
        mask: ``[T, T]``, ``[H, T, T]`` or ``[B, H, T, T]``, the same for all heads, of a kind with documents and no
            padding: a token that does not see the one before it begins one. Bool, or floats that are 0 where a key is
            shown.

    Returns:
        int64 ``[T]``, or ``[B, T]`` for each row, ascending from 0.
    """
    begins = _shown(mask, -1).logical_not()
    return torch.nn.functional.pad(begins.to(torch.int64), (1, 0)).cumsum(-1)


@mask_documents.register_fake
def _(mask: Tensor) -> Tensor:
    return mask.new_empty((*mask.shape[:-3], mask.shape[-1]), dtype=torch.int64)


def _shown(mask: Tensor, offset: int) -> Tensor:
    """bool ``[..., T + offset]``: does a token see the one at ``offset`` from it?"""
    shown = (mask.select(-3, 0) if mask.dim() > 2 else mask).diagonal(offset, -2, -1)
    return shown if mask.dtype == torch.bool else shown == 0
