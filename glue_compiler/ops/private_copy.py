"""A copy that compilers keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glue_compiler.ops.opaque import opaque


@opaque("private_copy")
def private_copy(x: Tensor) -> Tensor:
    """``x.clone()``, between what backward needs and what others may write.

    Inductor takes a ``clone`` out where forward and backward do not need it; that the caller may write in between is
    nothing that it sees. This operator is opaque to it.

    Args:
        x: any shape, dtype and strides.

    Returns:
        The same elements in memory of their own, in the strides that ``clone`` gives them.
    """
    return x.clone()


@private_copy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad


private_copy.register_autograd(_backward)
