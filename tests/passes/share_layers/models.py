"""Models of equal layers, and what one training step of them computes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.captured import compile_with_glue


class Layer(nn.Module):
    """x + W2 (gelu(W1 norm(x)) * table): enough operators to be worth a body."""

    def __init__(self, width: int = 8, eps: float = 1e-6, p: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.eps, self.p = eps, p

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.scale
        y = nn.functional.silu(self.gate(y)) * torch.tanh(self.up(y)) * table
        return x + nn.functional.dropout(self.down(y), self.p, self.training)


class Layers(nn.Module):
    def __init__(self, layers: list[nn.Module], width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        table = torch.arange(ids.shape[1]).to(x.dtype)[:, None].cos()
        for layer in self.layers:
            x = layer(x, table)
        return self.head(x)


def layers(count: int = 12, **arguments: Any) -> list[nn.Module]:
    return [Layer(**arguments) for _ in range(count)]


def ids(length: int = 5) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) % 11


def step(model: nn.Module, call: Any, inputs: Tensor) -> list[Tensor | None]:
    """Outputs, every gradient (None where there is none) and every buffer after a step, from one seed."""
    torch.manual_seed(3)
    found = call(inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs).backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return [*(out.detach().clone() for out in outputs), *gradients, *(b.clone() for b in model.buffers())]


def run_both(model: nn.Module, *inputs: Tensor, unshared: bool = False, **options: Any) -> Any:
    """Check that a step with shared layers is bitwise that of eager, in fp64; returns the pass's report.

    ``unshared``: that of the graphs without the pass, where AOTAutograd adds gradients up in another order than eager.
    """
    model = model.double()
    eager: Any = copy.deepcopy(model)
    other = compile_with_glue(eager, passes={"share_layers": False}, **options).call if unshared else eager
    run = compile_with_glue(model, **options)
    for each in inputs or (ids(),):
        expected, found = step(eager, other, each), step(model, run.call, each)
        assert [x is None for x in expected] == [x is None for x in found]
        for one, two in zip(expected, found, strict=True):
            assert one is None or torch.equal(one, two)
    return run.session.graphs[-1].passes[-1]
