"""What serves each part of a training step on a card that may not be here, and why: by the choosers themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from glue_compiler.ops import flash_attn4, quack_products
from glue_compiler.ops.attention_choice import AttentionCall, choose, unsupported
from glue_compiler.ops.cards import Card

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = (64, 128, 192, 256)
LENGTH = 8192
_EAGER = "the model's own operators"


@dataclass(frozen=True)
class Served:
    """``work`` of a step, the kernel that does it, and why that one."""

    work: str
    kernel: str
    reason: str


def served_on(card: Card) -> Iterator[Served]:
    """For ``compiler="inductor"``. Packages that may be installed are named as such: what is here says nothing."""
    for name, dtype in DTYPES.items():
        yield from _attention(card, name, dtype)
    first = "cuDNN, then torch's order" if card.prefers_cudnn else "torch's order"
    yield Served("plain causal attention", f"scaled_dot_product_attention: {first}", "whatever the dtype")
    yield _products(card)
    dtypes = "every dtype" if card.multiplies else "fp16 and fp32; torch's operators for bf16"
    yield Served("losses, expert sorting and gathering, lists of mask blocks", "glue's Triton kernels", dtypes)
    if not card.multiplies:
        yield Served("bf16", "torch's emulation, in eager", "Inductor compiles no graph of bf16 for it: use fp16")


def _attention(card: Card, name: str, dtype: torch.dtype) -> Iterator[Served]:
    served: dict[tuple[str, str], list[int]] = {}
    for head in HEADS:
        # Without flash-attn-4, which is said beside it.
        call = AttentionCall("cuda", card.capability, dtype, head, head, 32, 8, 1, LENGTH, kernels="torch")
        kernel = choose(call, "inductor")
        reason = unsupported(call, "inductor") or f"blocks that fit {card.shared >> 10} KiB of shared memory"
        text = "flex_attention" if kernel == "flex" else _EAGER
        if kernel and head <= card.flash4_head and dtype != torch.float32:
            text = f"{flash_attn4.PACKAGE} if installed, else {text}"
        served.setdefault((text, reason), []).append(head)
    for (text, reason), heads in served.items():
        of_heads = "" if len(heads) == len(HEADS) else f", heads of {', '.join(map(str, heads))}"
        yield Served(f"attention within documents or under a mask, {name}{of_heads}", text, reason)


def _products(card: Card) -> Served:
    work = "grouped products of experts"
    if not card.multiplies:
        return Served(work, "torch's products, expert by expert", "Triton has no products of matrices for it")
    if card.has_wgmma:
        text = f"{quack_products.PACKAGE} if installed, else glue's Triton kernels and torch's"
        return Served(work, text, "Hopper's own instructions; fp32 by glue's")
    return Served(work, "glue's Triton kernels", f"tiles that fit {card.shared >> 10} KiB of shared memory")
