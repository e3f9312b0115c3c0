"""Logits as sums of products of rows and weights, made for a chunk of rows, and their gradient taken back."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from glue_compiler.ops.loss_chunks import row_chunks

_ALIGNMENT = 64  # elements: rows of logits start at whole cache lines, as products and kernels are fast with


def accumulator_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float64 where one of the dtypes is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


class LinearLogits:
    """``sum_k rows[k] @ weights[k].T + bias``, in one buffer that every chunk of rows writes anew."""

    def __init__(self, rows: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None) -> None:
        self.rows, self.weights, self.bias = rows, weights, bias
        self.height, self.width = rows[0].shape[0], weights[0].shape[0]
        self.dtype = logits_dtype(rows, bias)
        self.device = rows[0].device
        self._stride = -(-self.width // _ALIGNMENT) * _ALIGNMENT
        self.chunks = row_chunks(self.height, self._stride * self.dtype.itemsize, self.device)

    @functools.cached_property
    def _buffer(self) -> Tensor:
        size = self.chunks[0].stop, self._stride
        return torch.empty(size, dtype=self.dtype, device=self.device)

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


class OperandGradients:
    """Gradients of rows, weights and bias, from those of the logits that come chunk by chunk.

    Gradients of weights and bias are summed in float32 (float64 for float64) and rounded once.
    """

    def __init__(self, logits: LinearLogits, needs_grad: Sequence[bool]) -> None:
        self._logits = logits
        count = len(logits.rows)
        self._of_rows = {
            k: logits.rows[k].new_zeros(logits.rows[k].shape) if not logits.chunks else _like(logits.rows[k])
            for k in range(count)
            if needs_grad[k]
        }
        self._of_weights: dict[int, Tensor | None] = {k: None for k in range(count) if needs_grad[count + k]}
        self._needs_bias, self._of_bias = needs_grad[2 * count], None
        self._needs_grad = needs_grad

    def add(self, chunk: slice, gradient: Tensor) -> None:
        """Takes up the gradient ``[rows of the chunk, V]`` of the chunk's logits."""
        is_only = len(self._logits.chunks) == 1
        for k, (rows, weight) in enumerate(zip(self._logits.rows, self._logits.weights, strict=True)):
            if k not in self._of_rows and k not in self._of_weights:
                continue
            left = gradient.to(rows.dtype)
            if k in self._of_rows:
                torch.mm(left, weight, out=self._of_rows[k][chunk])
            if k in self._of_weights:
                add = torch.mm if is_only else functools.partial(_add_product, self._of_weights[k])
                self._of_weights[k] = add(left.t(), rows[chunk])
        if self._needs_bias:
            bias = gradient.sum(0, dtype=accumulator_dtype(gradient.dtype))
            self._of_bias = bias if self._of_bias is None else self._of_bias.add_(bias)

    def results(self) -> list[Tensor]:
        """The gradients that are needed, in the order of rows, weights, bias, each in its operand's dtype."""
        count = len(self._logits.rows)
        operands = [*self._logits.rows, *self._logits.weights, self._logits.bias]
        found = {**self._of_rows, **{count + k: sum_ for k, sum_ in self._of_weights.items()}}
        found[2 * count] = self._of_bias
        results = []
        for place, operand in enumerate(operands):
            if self._needs_grad[place]:
                assert operand is not None
                value = found.pop(place)
                results.append(torch.zeros_like(_like(operand)) if value is None else value.to(operand.dtype))
        return results


def logits_dtype(rows: Sequence[Tensor], bias: Tensor | None) -> torch.dtype:
    """The dtype to which products and bias are promoted."""
    dtypes = [tensor.dtype for tensor in (*rows, *(() if bias is None else (bias,)))]
    return functools.reduce(torch.promote_types, dtypes)


def _like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """``total + left @ right``, summed in place."""
    dtype = accumulator_dtype(left.dtype)
    if left.dtype == dtype or not left.is_cuda:
        left, right = left.to(dtype), right.to(dtype)
        return torch.mm(left, right) if total is None else total.addmm_(left, right)
    if total is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.addmm(total, left, right, out_dtype=dtype, out=total)
