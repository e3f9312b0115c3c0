"""Shared by the tests of operators over linear logits: operands, and what eager makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from glue_compiler.ops.loss_chunks import ChunkLimits

glue = torch.ops.glue
IGNORED = -100
SMALL_CHUNKS = ChunkLimits(target_bytes=2048, least_rows=1, multiple=4)
HEADS = {
    "plain": {},
    "with a bias": {"bias": True},
    "adapted": {"widths": (12, 3), "bias": True},
    "scaled": {"scale": 0.3},
    "scaled by a negative number": {"scale": -0.3},
    "capped": {"scale": 0.2, "softcap": 5.0},
}


@dataclasses.dataclass
class Head:
    """Operands of logits, and how scores come from them."""

    rows: list[Tensor]
    weights: list[Tensor]
    bias: Tensor | None
    target: Tensor
    scale: float = 1.0
    softcap: float = 0.0

    @classmethod
    def random(
        cls, device="cpu", dtype=torch.float64, *, rows=37, classes=70, widths=(12,), bias=False, other=None, **how
    ) -> Head:
        """``other`` is the dtype of all operands but the first rows and weights."""
        dtypes = [dtype, *[other or dtype] * (len(widths) - 1)]

        def leaf(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(size, device=device).to(dtype).requires_grad_()

        target = torch.randint(classes, (rows,), device=device)
        target[3:6] = target[20:24] = IGNORED
        return cls(
            [leaf(rows, width, dtype=each) for width, each in zip(widths, dtypes, strict=True)],
            [leaf(classes, width, dtype=each) for width, each in zip(widths, dtypes, strict=True)],
            leaf(classes, dtype=other or dtype) if bias else None,
            target,
            **how,
        )

    def operands(self) -> Iterator[Tensor]:
        yield from (*self.rows, *self.weights)
        if self.bias is not None:
            yield self.bias

    def needs_grad(self) -> list[bool]:
        flags = [operand.requires_grad for operand in self.operands()]
        return flags if self.bias is not None else [*flags, False]

    def to(self, dtype: torch.dtype) -> Head:
        """The same values as leaves of their own."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)

        bias = None if self.bias is None else leaf(self.bias)
        return dataclasses.replace(
            self, rows=[leaf(each) for each in self.rows], weights=[leaf(each) for each in self.weights], bias=bias
        )

    def scores(self) -> Tensor:
        first, *others = [F.linear(rows, weight) for rows, weight in zip(self.rows, self.weights, strict=True)]
        for each in others:
            first = first + each
        logits = first if self.bias is None else first + self.bias
        scores = logits if self.scale == 1.0 else logits * self.scale
        return torch.tanh(scores) * self.softcap if self.softcap else scores

    def eager(self, dtype: torch.dtype, *, class_weight=None, reduction="mean", smoothing=0.0) -> Tensor:
        scores = self.scores().to(dtype)
        weight = None if class_weight is None else class_weight.to(dtype)
        return F.cross_entropy(
            scores, self.target, weight, reduction=reduction, label_smoothing=smoothing, ignore_index=IGNORED
        )

    def fused(
        self, dtype, *, class_weight=None, reduction="mean", smoothing=0.0, needs_grad=None, predictions=False
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        return glue.linear_cross_entropy(
            self.rows, self.weights, self.bias, self.target, class_weight, reduction, IGNORED, smoothing,
            self.scale, self.softcap, dtype, self.needs_grad() if needs_grad is None else needs_grad, predictions,
        )  # fmt: skip

    def gradients(self, loss: Tensor, upstream: float = 1.0, **how: bool) -> list[Tensor | None]:
        leaves = [operand for operand in self.operands() if operand.requires_grad]
        found = iter(torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream), **how))
        return [next(found) if operand.requires_grad else None for operand in self.operands()]


def same(values, expected, tolerance=1e-10):
    """Equal values, dtypes and Nones."""
    for value, reference in zip(values, expected, strict=True):
        assert (value is None) == (reference is None)
        if value is not None:
            assert value.dtype == reference.dtype
            torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance, equal_nan=True)


def counting(backend):
    """A compiler that hands on to ``backend``, and the list of graphs that it was given."""
    graphs = []

    def compiler(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, example_inputs)

    return compiler, graphs


def no_worse(device: str) -> float:
    """How much further from fp64 than eager a result in bf16 may be: cuBLAS adds up products of few rows otherwise."""
    return 1.02 if device == "cpu" else 1.1


def products(run):
    """Of each product the shapes of its operands."""
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    factors = {"aten::mm": slice(2), "aten::addmm": slice(1, 3), "aten::addmm_": slice(1, 3)}
    return [event.input_shapes[factors[event.name]] for event in profile.events() if event.name in factors]


def multiplications(run):
    return sum(left[0] * left[1] * right[1] for left, right in products(run))
