"""Logits as sums of products of rows and weights, made for a chunk of rows, and their gradient taken back."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from glue_compiler.ops.counted_rows import CountedRows
from glue_compiler.ops.kernel_support import accumulator_dtype
from glue_compiler.ops.loss_chunks import row_chunks

# In elements: on a GPU rows of logits start at whole cache lines, as products and kernels are fast with. Not on a CPU,
# where torch 2.13 multiplies bfloat16 columns that lie between such rows, and what a NaN there gives is a NaN.
_ALIGNMENT = {"cuda": 64}


class LinearLogits:
    """``sum_k rows[k] @ weights[k].T + bias``, in one buffer that every chunk of rows writes anew.

    Args:
        needs_grad: for rows, weights and bias, in that order, whether :class:`OperandGradients` makes their gradient.
        counted: which rows are computed; None: all. ``chunks`` cut those that count, ``others`` those behind them.
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        weights: Sequence[Tensor],
        bias: Tensor | None,
        needs_grad: Sequence[bool] = (),
        counted: CountedRows | None = None,
    ) -> None:
        self.counted = counted or CountedRows(rows[0].shape[0], rows[0].shape[0])
        self.rows, self.weights, self.bias = [self.counted.take(each) for each in rows], weights, bias
        self.height, self.width = self.rows[0].shape[0], weights[0].shape[0]
        self.dtype = logits_dtype(rows, bias)
        alignment = _ALIGNMENT.get(rows[0].device.type, 1)
        stride = -(-self.width // alignment) * alignment
        sums = _bytes_of_sums(weights, needs_grad[len(rows) :])
        count, row_bytes = self.counted.count, stride * self.dtype.itemsize
        self.chunks = row_chunks(count, row_bytes, rows[0].device, sums)
        behind = row_chunks(self.height - count, row_bytes, rows[0].device)
        self.others = [slice(count + each.start, count + each.stop) for each in behind]
        size = max((each.stop - each.start for each in (*self.chunks, *self.others)), default=0), stride
        self._buffer = torch.empty(size, dtype=self.dtype, device=rows[0].device)

    def of(self, chunk: slice) -> Tensor:
        """``[rows of the chunk, V]``, in the buffer."""
        out = self._buffer[: chunk.stop - chunk.start, : self.width]
        products = [(rows[chunk], weight.t()) for rows, weight in zip(self.rows, self.weights, strict=True)]
        bias = self.bias
        if any(rows.dtype != self.dtype for rows, _ in products):
            out.copy_(functools.reduce(torch.add, (torch.mm(*product) for product in products)))
            return out if bias is None else out.add_(bias)
        first, *others = products
        if bias is not None and bias.dtype == self.dtype:
            torch.addmm(bias, *first, out=out)
        else:
            torch.mm(*first, out=out)
            if bias is not None:
                out.add_(bias)
        for product in others:
            out.addmm_(*product)
        return out

    def free(self) -> None:
        """Gives the buffer's memory back."""
        del self._buffer


class OperandGradients:
    """Gradients of rows, weights and bias, from those of the logits that come chunk by chunk.

    Gradients of weights and bias are summed in float32 (float64 for float64) and rounded once.
    """

    def __init__(self, logits: LinearLogits, needs_grad: Sequence[bool]) -> None:
        self._logits, self._needs_grad = logits, needs_grad
        self._operands = [*logits.rows, *logits.weights, logits.bias]
        # A chunk writes its part of a gradient of rows; the others are sums, None before the first chunk.
        self._of_rows = {
            place: rows.new_empty(logits.counted.count, rows.shape[1])
            for place, rows in enumerate(logits.rows)
            if needs_grad[place]
        }
        self._sums: dict[int, Tensor] = {}

    def add(self, chunk: slice, gradient: Tensor) -> None:
        """Takes up the gradient ``[rows of the chunk, V]`` of the chunk's logits."""
        logits, count = self._logits, len(self._logits.rows)
        for k, (rows, weight) in enumerate(zip(logits.rows, logits.weights, strict=True)):
            if not (self._needs_grad[k] or self._needs_grad[count + k]):
                continue
            left = gradient.to(rows.dtype)
            if self._needs_grad[k]:
                torch.mm(left, weight, out=self._of_rows[k][chunk])
            if self._needs_grad[count + k]:
                if len(logits.chunks) == 1:
                    self._sums[count + k] = torch.mm(left.t(), rows[chunk])
                else:
                    self._sums[count + k] = _plus_product(self._sums.get(count + k), left.t(), rows[chunk])
        if self._needs_grad[2 * count]:
            of_bias = gradient.sum(0, dtype=accumulator_dtype(gradient.dtype))
            self._sums[2 * count] = self._sums[2 * count].add_(of_bias) if 2 * count in self._sums else of_bias

    def results(self) -> list[Tensor]:
        """The gradients that are needed, in the order of rows, weights, bias, each in its operand's dtype.

        To be called once, at the end: it frees the logits, and each sum when it was rounded.
        """
        self._logits.free()
        return [self._result(place) for place, needed in enumerate(self._needs_grad) if needed]

    def _result(self, place: int) -> Tensor:
        operand = self._operands[place]
        assert operand is not None
        if place in self._of_rows:
            return self._logits.counted.put(self._of_rows[place])
        return self._sums.pop(place).to(operand.dtype) if place in self._sums else operand.new_zeros(operand.shape)


def logits_dtype(rows: Sequence[Tensor], bias: Tensor | None) -> torch.dtype:
    """The dtype to which products and bias are promoted."""
    dtypes = [tensor.dtype for tensor in (*rows, *(() if bias is None else (bias,)))]
    return functools.reduce(torch.promote_types, dtypes)


def _bytes_of_sums(weights: Sequence[Tensor], needs_grad: Sequence[bool]) -> int:
    """What gradients of weights take while several chunks add them up, beside what they are rounded to."""
    summed = [weight for weight, needed in zip(weights, needs_grad, strict=False) if needed]
    wider = [(weight, accumulator_dtype(weight.dtype)) for weight in summed]
    return sum(weight.numel() * dtype.itemsize for weight, dtype in wider if dtype != weight.dtype)


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """``total + left @ right`` in the accumulators' dtype, written over ``total``; None stands for zeros."""
    dtype = accumulator_dtype(left.dtype)
    if left.dtype == dtype or not left.is_cuda:
        left, right = left.to(dtype), right.to(dtype)
        return torch.mm(left, right) if total is None else total.addmm_(left, right)
    if total is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.addmm(total, left, right, out_dtype=dtype, out=total)
