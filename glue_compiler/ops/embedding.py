"""An embedding whose gradient is summed by torch's own kernel, as in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glue_compiler.compat import wrapper_tensors
from glue_compiler.ops.composite import composite
from glue_compiler.ops.opaque import opaque

_LEAST = 2**22
"""Numbers in a table, from which on its gradient is left to torch's kernel: 16 MiB in fp32."""
_FEW = 4096
"""Rows in 16 bits, up to which ``embedding_dense_backward`` may round each sum again and again: it is given fp32."""
_EMBEDDING_BACKWARD = torch.ops.aten.embedding_dense_backward.default


def pays(weight: Tensor) -> bool:
    """Is the gradient of the table ``weight`` better left to torch's kernel? By what is known of fakes.

    Inductor sums in an fp32 table of the same size and rounds that: twice the memory of the result on top of it, all of
    which is written and read once more. Where the table is in fp32 already there is no other.
    """
    numbers = weight.numel()
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and isinstance(numbers, int)
        and numbers >= _LEAST
    )


@composite("(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False) -> Tensor")
def embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False) -> Tensor:
    """``torch.nn.functional.embedding`` without ``max_norm`` and ``sparse``.

    Args:
        weight: ``[V, D]``. indices: int32 or int64, any shape, each at least 0 and less than ``V``.
        padding_idx: rows of this index have no gradient; -1: all have.
        scale_grad_by_freq: divide the gradient of a row by how often ``indices`` has it.

    Returns:
        ``[*indices.shape, D]`` in the dtype of ``weight``.

    Gradient: of ``weight`` by ``embedding_gradient``.
    """
    found: Tensor = _Embedding.apply(weight, indices, padding_idx, scale_grad_by_freq)
    return found


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, *settings: Any) -> Tensor:
        ctx.settings = weight.shape[0], *settings
        ctx.save_for_backward(indices)
        return torch.ops.aten.embedding.default(weight, indices, *settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        # What is wrapped may know torch's operators alone.
        backward = _EMBEDDING_BACKWARD if wrapper_tensors.is_wrapper(grad) else embedding_gradient
        return backward(grad, indices, *ctx.settings), None, None, None


@opaque("embedding_gradient")
def embedding_gradient(
    grad: Tensor, indices: Tensor, rows: int, padding_idx: int = -1, scale_grad_by_freq: bool = False
) -> Tensor:
    """``aten::embedding_dense_backward``, which compilers do not take apart.

    Args:
        grad: floating ``[*indices.shape, D]``, any strides. indices: int32 or int64, as of :func:`embedding`.
        rows: ``V``. padding_idx, scale_grad_by_freq: as of :func:`embedding`.

    Returns:
        ``[V, D]`` in the dtype of ``grad``, contiguous: for each index the sum of its rows, on a GPU in fp32, rounded
        once; zeros where there are none. No host synchronisation; two runs are bitwise equal.
    """
    if not grad.numel():
        return grad.new_zeros(rows, grad.shape[-1])
    is_narrow = grad.dtype in (torch.bfloat16, torch.float16)
    sum_rows = _sum_few if grad.is_cuda and is_narrow and indices.numel() <= _FEW else _EMBEDDING_BACKWARD
    return sum_rows(grad, indices, rows, padding_idx, scale_grad_by_freq)


def _sum_few(grad: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
    """Sums in a table in fp32 with a row for each of ``indices``; of those that are equal the first one is used."""
    flat = indices.flatten()
    places = torch.arange(flat.numel(), device=grad.device)
    place_of = torch.empty(rows, dtype=torch.long, device=grad.device)
    place_of.scatter_reduce_(0, flat.long(), places, "amin", include_self=False)
    place = place_of[flat]
    kept = grad.reshape(-1, grad.shape[-1]).float().masked_fill((flat == padding_idx)[:, None], 0)
    sums = _EMBEDDING_BACKWARD(kept, place, flat.numel(), -1, scale_grad_by_freq).to(grad.dtype)
    out = grad.new_zeros(rows, grad.shape[-1])
    out[flat] = sums[place]  # an index that is there twice writes the same twice
    return out


@embedding_gradient.register_fake
def _(grad: Tensor, indices: Tensor, rows: int, padding_idx: int = -1, scale_grad_by_freq: bool = False) -> Tensor:
    return grad.new_empty(rows, grad.shape[-1])
