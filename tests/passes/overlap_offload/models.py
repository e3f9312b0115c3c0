"""Small models with checkpointed regions, and a training step that returns everything it computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """x + W2 gelu(W1 x): its input is read at its start and at its end, in forward and in backward."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, dtype=dtype)
        self.down = nn.Linear(2 * width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x.to(self.up.weight.dtype)))).to(x.dtype)


class Blocks(nn.Module):
    """An embedding, ``count`` checkpointed blocks and a head. ``between`` sees each block's output."""

    def __init__(self, count: int = 5, width: int = 8, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, dtypes[i % len(dtypes)]) for i in range(count))
        self.head = nn.Linear(width, 3)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.between(checkpoint(block, x, use_reentrant=False))
        return self.head(x)


def step(call: Any, model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Output and every gradient of one training step from zeroed gradients."""
    model.zero_grad()
    out = call(*inputs)
    out.square().sum().backward()
    return [out.detach(), *gradients(model)]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
