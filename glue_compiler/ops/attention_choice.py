"""Which kernel serves an attention call without a mask, and whether one does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from glue_compiler.ops import cards, flash_attn4
from glue_compiler.options import Compiler, Kernels

Kernel = Literal["flex", "varlen", "flash4"]
"""``flex``: ``packed_attention`` with ``document_blocks``, from ``document_offsets``, or ``masked_attention``.
``varlen``: ``packed_attention`` without, from ``exact_document_offsets`` on CUDA, whose grid of blocks grows with empty
documents. ``flash4``: the same with FlashAttention 4."""

_FLASH4_LENGTH = 1024
"""Tokens in a row from which on FlashAttention 4 is taken: shorter ones were not measured."""


@dataclass(frozen=True)
class AttentionCall:
    """What the choice of a kernel depends on. ``None``: not known when the graph is compiled.

    Attributes:
        device: type, ``"cuda"`` or ``"cpu"``.
        capability: of the card, ``(9, 0)`` for Hopper; None off NVIDIA's.
        dtype: of query, key and value; under autocast, of autocast.
        head_size: of query and key. value_size: of value.
        heads, key_heads: number of heads.
        rows: of the batch. length: tokens in a row.
        dropout: probability that is applied.
        hides_keys: some keys are seen by no query, such as padding.
        kernels: which may serve it, of the option of that name.
    """

    device: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_size: int | torch.SymInt
    value_size: int | torch.SymInt
    heads: int
    key_heads: int
    rows: int | None
    length: int | None
    dropout: float = 0.0
    hides_keys: bool = False
    kernels: Kernels = "all"

    @property
    def card(self) -> cards.Card | None:
        return None if self.capability is None else cards.of_capability(self.capability)

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> AttentionCall:
        """From query ``[B, Hq, T, D]``, key and value ``[B, Hkv, T, D]``, real or fake."""
        dtype, card = query.dtype, cards.of_device(query.device)
        if torch.is_autocast_enabled(query.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(query.device.type)
        return cls(
            device=query.device.type,
            capability=None if card is None else card.capability,
            dtype=dtype,
            head_size=query.shape[3],
            value_size=value.shape[3],
            heads=query.shape[1],
            key_heads=key.shape[1],
            rows=rows if isinstance(rows := query.shape[0], int) else None,
            length=length if isinstance(length := query.shape[2], int) else None,
            dropout=dropout,
        )


def choose(call: AttentionCall, compiler: Compiler) -> Kernel | None:
    """The kernel for ``call`` in a graph that ``compiler`` gets, or None where :func:`unsupported` has a reason."""
    if _general_reason(call):
        return None
    if call.device == "cpu":
        if _cpu_reason(compiler):
            return None
        return "flex" if call.hides_keys else "varlen"
    if _prefers_flash4(call):
        # 0.5 to 0.9 of flex_attention's time in benchmarks/attention_kernels.py.
        return "flash4"
    if compiler == "inductor" and not _flex_reason(call):
        # Faster than FlashAttention 2 in every shape of benchmarks/attention_kernels.py, forward and backward,
        # deterministic, and free of host synchronisation.
        return "flex"
    return None if call.hides_keys or _flash_reason(call) else "varlen"


def unsupported(call: AttentionCall, compiler: Compiler) -> str | None:
    """Why no kernel serves ``call``, and what would change it; None if one does."""
    if choose(call, compiler):
        return None
    if reason := _general_reason(call):
        return reason
    if call.device == "cpu":
        return _cpu_reason(compiler)
    if compiler == "inductor":
        return _flex_reason(call)
    if call.hides_keys:
        return "only flex_attention leaves single keys out, and only compiler='inductor' makes a kernel of it"
    return _flash_reason(call)


def sdpa_shares_heads(call: AttentionCall) -> bool:
    """Has sdpa a kernel that keeps no scores and takes fewer key heads than query heads?

    FlashAttention has; the memory-efficient kernel has not up to torch 2.13, and what is left makes all scores.
    """
    if call.capability is None:
        return True
    sizes = call.head_size, call.value_size
    fits = all(isinstance(size, int) and size <= 256 for size in sizes) and sizes[0] == sizes[1]
    return call.capability >= (8, 0) and call.dtype in (torch.float16, torch.bfloat16) and fits


def prefers_cudnn(device: torch.device, length: int | torch.SymInt) -> bool:
    """Whether cuDNN is the faster of sdpa's kernels for a plain causal mask.

    It builds a plan for each new length, so not where lengths vary.
    """
    card = cards.of_device(device)
    return card is not None and card.prefers_cudnn and isinstance(length, int)


def _general_reason(call: AttentionCall) -> str | None:
    if call.device == "cuda" and not isinstance(call.head_size, int):
        return "the size of heads is not known when the graph is compiled; torch._dynamo.mark_static makes it known"
    if call.dropout > 0:
        return f"attention dropout is {call.dropout}, and the packed kernels have none; set it to 0"
    if call.head_size != call.value_size:
        return f"values have size {call.value_size} and keys {call.head_size}; the packed kernels take one size"
    if call.heads % call.key_heads:
        return f"{call.key_heads} key heads do not divide {call.heads} query heads"
    if call.device not in ("cpu", "cuda"):
        return f"there is no packed kernel for device '{call.device}'"
    if not call.dtype.is_floating_point:
        return f"there is no packed kernel for {call.dtype}"
    return None


def _cpu_reason(compiler: Compiler) -> str | None:
    if compiler == "inductor":
        # Measured: 158 ms against 65 for a document of 512, 297 against 1096 for 16 of 128; lengths are values.
        return "the CPU's packed kernel is a reference, and slower than a mask unless documents are many and short"
    return None


def _flex_reason(call: AttentionCall) -> str | None:
    if call.card is not None and not call.card.multiplies:
        return "flex_attention needs a GPU of compute capability 8.0"
    if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"flex_attention has no kernel for {call.dtype} on CUDA"
    if not call.hides_keys and (call.rows is None or call.length is None):
        return (
            "flex_attention is taken for static sizes of the batch alone; dynamic=False gives each size its own graph"
        )
    if not 16 <= call.head_size <= 256:
        return f"head size {call.head_size} is outside of flex_attention's 16 to 256"
    return None


def _prefers_flash4(call: AttentionCall) -> bool:
    """Would FlashAttention 4 serve the call, with gradients, and faster than what comes with torch? It is imported when
    a batch is large enough for it, and where it cannot be, FlashAttention 2 takes its place."""
    return (
        call.kernels == "all"
        and call.card is not None
        and call.dtype in (torch.float16, torch.bfloat16)
        and (call.length is None or call.length >= _FLASH4_LENGTH)
        and not call.hides_keys
        and call.head_size <= call.card.flash4_head
        and call.head_size % 8 == 0
        and not torch.are_deterministic_algorithms_enabled()
        and flash_attn4.is_installed()
    )


def _flash_reason(call: AttentionCall) -> str | None:
    if call.card is not None and not call.card.multiplies:
        return "FlashAttention needs a GPU of compute capability 8.0"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention has no kernel for {call.dtype}; use bf16 or fp16, or compiler='inductor'"
    if call.head_size > 256 or call.head_size % 8:
        return f"head size {call.head_size} is over 256 or not divisible by 8, which FlashAttention needs"
    return None
