"""Two halves that alternate in the last dimension, as gpt-oss stores gate and up, taken apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("glue", "FRAGMENT")
_library.define("deinterleave(Tensor x) -> (Tensor, Tensor)")


def deinterleave(x: Tensor) -> tuple[Tensor, Tensor]:
    """``(x[..., ::2], x[..., 1::2])``, and its gradient without the sum of two tensors that are half zeros.

    Args:
        x: any dtype and strides, an even last dimension. bf16 on CUDA with a contiguous last dimension is read as words
            of two numbers: Inductor then makes one pointwise kernel each of forward and backward. On one H200, torch
            2.11, the activation of a gpt-oss layer takes 0.13 and 0.23 ms instead of 0.19 and 0.48 ms.

    Returns:
        Two tensors of half the width, bit for bit the columns of ``x`` (a NaN stays one). They may be views or not.

    Composite: tracing sees what it is made of.
    """
    if x.dtype is torch.bfloat16 and x.is_cuda and _is_pairs(x):
        return _Deinterleave.apply(x)
    return x[..., ::2], x[..., 1::2]


_library.impl("deinterleave", deinterleave, "CompositeImplicitAutograd")


def _is_pairs(x: Tensor) -> bool:
    """Can it be read as 32-bit words? Sizes and strides that are not known as numbers cannot."""
    numbers = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(isinstance(number, int) and number % 2 == 0 for number in numbers)


class _Deinterleave(torch.autograd.Function):
    """Of bf16, whose bits are the upper half of those of fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        words = x.view(torch.int32)
        even, odd = (words << 16).view(torch.float32), (words & -65536).view(torch.float32)
        return even.to(torch.bfloat16), odd.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, even: Tensor, odd: Tensor) -> Tensor:
        return _Interleave.apply(even, odd)


class _Interleave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, even: Tensor, odd: Tensor) -> Tensor:
        low = even.view(torch.int16).to(torch.int32) & 0xFFFF
        high = odd.view(torch.int16).to(torch.int32) << 16
        return (low | high).contiguous().view(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _Deinterleave.apply(grad.contiguous())
