"""Models with an MLP, of few numbers and many rows, and what a training step of them computes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from torch.utils.checkpoint import checkpoint

from tests.captured import compile_with_glue

ROWS = 2048
WIDTH = 4


class Gated(nn.Module):
    """x + W3 (silu(W1 norm(x)) * (W2 norm(x)))."""

    def __init__(self, bias: bool = False, inner: int = 8 * WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.gate, self.up = nn.Linear(WIDTH, inner, bias), nn.Linear(WIDTH, inner, bias)
        self.down = nn.Linear(inner, WIDTH, bias)

    def wide(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return silu(self.gate(y)) * self.up(y)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.wide(x))


class Plain(Gated):
    def wide(self, x: Tensor) -> Tensor:
        return gelu(self.gate(x))


class Adapted(Gated):
    """With LoRA on all three products."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__(bias)
        self.requires_grad_(False)
        pairs = {"gate": self.gate, "up": self.up, "down": self.down}
        self.first = nn.ModuleDict({n: nn.Linear(w.in_features, 2, bias=False) for n, w in pairs.items()})
        self.second = nn.ModuleDict({n: nn.Linear(2, w.out_features, bias=False) for n, w in pairs.items()})

    def adapted(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, name)(x) + 2.0 * self.second[name](self.first[name](x))

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.adapted("down", silu(self.adapted("gate", y)) * self.adapted("up", y))


class Stack(nn.Module):
    """Layers, each under a checkpoint, each with a sum of neighbouring rows in front of it."""

    def __init__(self, layers: list[nn.Module], checkpointed: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.checkpointed = checkpointed
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(_mixed, layer, x, use_reentrant=False) if self.checkpointed else _mixed(layer, x)
        return self.head(x)


def _mixed(layer: nn.Module, x: Tensor) -> Any:
    return layer(x + x.roll(1, -2))


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def step(model: nn.Module, call: Any, x: Tensor) -> list[Tensor | None]:
    """Outputs and every gradient (None where there is none) after a step, from one seed."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    out = call(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return [out.detach(), x.grad, *gradients]


def run_both(
    model: nn.Module,
    *inputs: Tensor,
    dtype: torch.dtype = torch.float64,
    report_of: str = "tile_rows",
    **options: Any,
) -> Any:
    """Check a step in tiles against eager's; returns the report of that pass over the first graph."""
    torch.manual_seed(0)
    model = model.to(dtype)
    eager = copy.deepcopy(model)
    run = compile_with_glue(model, **{"compiler": "aot_eager", "passes": {"tile_rows": True}, **options})
    for each in inputs or (torch.randn(ROWS, WIDTH),):
        expected, found = step(eager, eager, each.to(dtype)), step(model, run.call, each.to(dtype))
        assert [x is None for x in expected] == [x is None for x in found]
        for one, two in zip(expected, found, strict=True):
            if one is not None:
                torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-12)
    return next(p for p in run.session.graphs[0].passes if p.name == report_of)
