"""A small head, its logits in eager, and the same deferred."""

from __future__ import annotations

import torch
from torch import Tensor

from glue_compiler.deferred.head import Elementwise, Head, Term
from glue_compiler.deferred.tensor import DeferredTensor, defer

WORDS = 11

PLAIN = Head((Term(),))
CAPPED = Head(
    (Term(has_bias=True),),
    (Elementwise("divide", factor=3.0), Elementwise("tanh"), Elementwise("multiply", factor=3.0)),
)
ADAPTED = Head((Term(), Term(scale=0.5)), (Elementwise("multiply", factor=0.25),))


class Operands:
    """Rows, weights and biases for a head, in eager's order: leaves that need gradients."""

    def __init__(
        self,
        head: Head = PLAIN,
        lead: tuple[int, ...] = (2, 5),
        dtype: torch.dtype = torch.float64,
        requires_grad: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def leaf(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)

        self.head = head
        self.rows = [leaf(*lead, 8 - index) for index, _ in enumerate(head.terms)]
        self.weights = [leaf(WORDS, 8 - index) for index, _ in enumerate(head.terms)]
        self.biases = [leaf(WORDS) for term in head.terms if term.has_bias]

    @property
    def all(self) -> list[Tensor]:
        return [*self.rows, *self.weights, *self.biases]

    def eager(self) -> Tensor:
        return self.head.logits(self.rows, self.weights, self.biases)

    def deferred(self) -> Tensor:
        logits = defer(self.head, self.rows, self.weights, self.biases)
        assert isinstance(logits, DeferredTensor)
        return logits


def is_deferred(tensor: Tensor) -> bool:
    """Does it have no values yet?"""
    return isinstance(tensor, DeferredTensor) and not tensor._deferred.is_computed


def projected(tensor: Tensor) -> Tensor:
    """A number that every element has another share in."""
    generator = torch.Generator().manual_seed(1)
    return (tensor * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)).sum()


def assert_same_gradients(result: Tensor, expected: Tensor, operands: Operands) -> None:
    leaves = [leaf for leaf in operands.all if leaf.requires_grad]
    got = torch.autograd.grad(projected(result), leaves, allow_unused=True)
    wanted = torch.autograd.grad(projected(expected), leaves, allow_unused=True)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
