"""How logits come from hidden states: plain data, evaluated with the operators that the graph had."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from glue_compiler.errors import GlueDeferredError


@dataclass(frozen=True)
class Term:
    """A product ``rows @ weight.T``.

    Attributes:
        dtype: what rows, weight and bias are cast to first; None: they are taken as they are.
        scale: what the product is multiplied with.
        has_bias: does the product itself add one, as ``linear`` and ``addmm`` do (rounded once)?
    """

    dtype: torch.dtype | None = None
    scale: float | None = None
    has_bias: bool = False


@dataclass(frozen=True)
class Elementwise:
    """What is done to each number of the sum: ``factor`` belongs to a product or quotient, ``dtype`` to a cast."""

    kind: Literal["multiply", "divide", "tanh", "cast"]
    factor: float = 1.0
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Head:
    """The terms are added up in order, then come the steps. What autocast did to the graph is written out in it.

    Operands, everywhere: ``rows`` and ``weights`` have an item for each term, ``biases`` one for each term that has
    one. ``rows[k]`` is ``[*lead, K_k]``, ``weights[k]`` ``[V, K_k]``, a bias ``[V]``.
    """

    terms: tuple[Term, ...]
    steps: tuple[Elementwise, ...] = ()
    why_unreadable: str = ""
    """Why the logits cannot be computed; ``""``: they can."""

    def logits(self, rows: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
        """``[*lead, V]``, differentiable where gradients are recorded."""
        with _without_autocast(rows[0].device):
            return self.stages(rows, weights, biases)[-1]

    def dtype(self, rows: Sequence[Tensor], weights: Sequence[Tensor]) -> torch.dtype:
        """Of the logits."""
        dtype = self._dtype_of_sum(rows)
        for step in self.steps:
            dtype = step.dtype or dtype
        return dtype

    def gradients(
        self,
        gradient: Tensor,
        rows: Sequence[Tensor],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Gradients of rows, weights and biases, in that order, from that of the logits; None where not ``needed``.

        Differentiable where gradients are recorded. The products are computed again only for ``tanh``.
        """
        with _without_autocast(rows[0].device):
            if any(step.kind == "tanh" for step in self.steps):
                outputs = self.stages(rows, weights, biases, keep=True)[1:]
            else:
                outputs = [None] * len(self.steps)
            dtypes = [self._dtype_of_sum(rows)]
            for step in self.steps:
                dtypes.append(step.dtype or dtypes[-1])
            for step, output, dtype in reversed(list(zip(self.steps, outputs, dtypes[:-1], strict=True))):
                gradient = _gradient_of_step(step, gradient, output, dtype)

            of_rows: list[Tensor | None] = []
            of_weights: list[Tensor | None] = []
            of_biases: list[Tensor | None] = []
            count = len(self.terms)
            for index, term in enumerate(self.terms):
                row, weight = _cast(rows[index], term.dtype), _cast(weights[index], term.dtype)
                product = gradient.to(row.dtype)
                if term.scale is not None:
                    product = product * term.scale
                product = product.reshape(-1, product.shape[-1])
                of_rows.append((product @ weight).view(row.shape).to(rows[index].dtype) if needed[index] else None)
                flat = row.reshape(-1, row.shape[-1])
                of_weights.append(
                    (product.t() @ flat).to(weights[index].dtype) if needed[count + index] else None,
                )
                if term.has_bias:
                    position = len(of_biases)
                    wanted = needed[2 * count + position]
                    of_biases.append(product.sum(0).to(biases[position].dtype) if wanted else None)
            return of_rows + of_weights + of_biases

    def _dtype_of_sum(self, rows: Sequence[Tensor]) -> torch.dtype:
        dtypes = [term.dtype or row.dtype for term, row in zip(self.terms, rows, strict=True)]
        result = dtypes[0]
        for dtype in dtypes[1:]:
            result = torch.promote_types(result, dtype)
        return result

    def stages(
        self, rows: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], keep: bool = False
    ) -> list[Any]:
        """The sum of the terms and what each step makes of it; only the last is there if not ``keep``.

        With ``keep``, operands may be ``fx.Proxy`` objects: the operators are then appended to their graph.

        Raises:
            GlueDeferredError: they cannot be computed.
        """
        if self.why_unreadable:
            raise GlueDeferredError(self.why_unreadable)
        in_place = not keep and not torch.is_grad_enabled()
        remaining = iter(biases)
        total: Tensor | None = None
        for term, row, weight in zip(self.terms, rows, weights, strict=True):
            bias = _cast(next(remaining), term.dtype) if term.has_bias else None
            product = functional.linear(_cast(row, term.dtype), _cast(weight, term.dtype), bias)
            if term.scale is not None:
                product = product.mul_(term.scale) if in_place else product * term.scale
            if total is None:
                total = product
            else:
                total = total.add_(product) if in_place and total.dtype == product.dtype else total + product
        outputs: list[Any] = [total]
        for step in self.steps:
            output = _apply(step, outputs[-1], in_place)
            outputs = [*outputs, output] if keep else [output]
        return outputs


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _apply(step: Elementwise, value: Tensor, in_place: bool) -> Tensor:
    match step.kind:
        case "multiply":
            return value.mul_(step.factor) if in_place else value * step.factor
        case "divide":
            return value.div_(step.factor) if in_place else value / step.factor
        case "tanh":
            return value.tanh_() if in_place else value.tanh()
        case "cast":
            return value.to(step.dtype)


def _gradient_of_step(step: Elementwise, gradient: Tensor, output: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``dtype`` is that of the step's input."""
    match step.kind:
        case "multiply":
            return gradient * step.factor
        case "divide":
            return gradient / step.factor
        case "tanh":
            return torch.ops.aten.tanh_backward(gradient, output)
        case "cast":
            return gradient.to(dtype)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
