"""The decoder that the offload benchmarks train: Qwen3's layers, checkpointed, frozen but for LoRA adapters."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Of a decoder with grouped-query attention and a gated MLP; ``tokens`` in each of ``batch`` sequences.

    ``vocabulary`` is for models of transformers; :class:`Decoder` has none.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    layers: int
    batch: int
    tokens: int
    vocabulary: int = 32000

    @property
    def input_bytes(self) -> int:
        """Of one layer's input in bf16."""
        return 2 * self.batch * self.tokens * self.hidden

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices, without adapters."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate


SIZES = {
    "8b": {"hidden": 4096, "intermediate": 12288, "heads": 32, "kv_heads": 8, "head_size": 128, "layers": 16},
    "14b": {"hidden": 5120, "intermediate": 17408, "heads": 40, "kv_heads": 8, "head_size": 128, "layers": 40},
    "32b": {"hidden": 5120, "intermediate": 25600, "heads": 64, "kv_heads": 8, "head_size": 128, "layers": 64},
    "tiny": {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_size": 64, "layers": 6},
}
"""Sizes of Qwen3's 8B (16 of its 36 layers), 14B and 32B, and one for references and tests."""


def add_shape_arguments(parser: argparse.ArgumentParser, size: str = "8b", tokens: int = 8192) -> None:
    parser.add_argument("--shape", choices=SIZES, default=size)
    for name in ("hidden", "intermediate", "heads", "kv-heads", "head-size", "layers"):
        parser.add_argument(f"--{name}", type=int, help="instead of the shape's")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=Shape.vocabulary, help="of models of transformers")
    parser.add_argument("--tokens", type=int, default=tokens, help="in each sequence")


def shape_of(given: argparse.Namespace) -> Shape:
    sizes = {
        name: size if getattr(given, name) is None else getattr(given, name)
        for name, size in SIZES[given.shape].items()
    }
    return Shape(**sizes, batch=given.batch, tokens=given.tokens, vocabulary=given.vocabulary)


class LoraLinear(nn.Module):
    """A frozen weight and a trained product of rank 16."""

    def __init__(self, wide_in: int, wide_out: int, **kwargs: Any) -> None:
        super().__init__()
        self.base = nn.Linear(wide_in, wide_out, bias=False, **kwargs).requires_grad_(False)
        self.down = nn.Linear(wide_in, 16, bias=False, **kwargs)
        self.up = nn.Linear(16, wide_out, bias=False, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    """Qwen3's decoder layer: normalised heads, rotary positions, grouped key and value heads, a gated MLP."""

    def __init__(self, shape: Shape, **kwargs: Any) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.query = LoraLinear(shape.hidden, wide, **kwargs)
        self.key = nn.Linear(shape.hidden, narrow, bias=False, **kwargs).requires_grad_(False)
        self.value = LoraLinear(shape.hidden, narrow, **kwargs)
        self.out = nn.Linear(wide, shape.hidden, bias=False, **kwargs).requires_grad_(False)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False, **kwargs).requires_grad_(False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False, **kwargs).requires_grad_(False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False, **kwargs).requires_grad_(False)
        self.before_attention = nn.RMSNorm(shape.hidden, eps=1e-6, **kwargs).requires_grad_(False)
        self.before_mlp = nn.RMSNorm(shape.hidden, eps=1e-6, **kwargs).requires_grad_(False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = self.shape
        h = self.before_attention(x)
        q, k, v = (
            p(h).view(x.shape[0], x.shape[1], -1, shape.head_size).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        q, k = (functional.rms_norm(t, (shape.head_size,)) for t in (q, k))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        h = self.before_mlp(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


RunLayer = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def checkpointed(layer: nn.Module, *given: Tensor) -> Tensor:
    return checkpoint(layer, *given, use_reentrant=False)


class Checkpointed(nn.Module):
    """A layer that checkpoints itself, as those of transformers do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *given: Tensor) -> Tensor:
        return checkpointed(self.layer, *given)


class Decoder(nn.Module):
    """Layers, checkpointed unless ``run_layer`` says otherwise, and a random projection as the loss: a vocabulary would
    only add time to all rows.

    Takes ``x`` ``[batch, tokens, hidden]`` of at most ``shape.tokens`` tokens, and ``target`` of the same sizes, whose
    dtype is the loss's.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        run_layer: RunLayer = checkpointed,
    ) -> None:
        super().__init__()
        self.run_layer = run_layer
        kwargs = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList(Layer(shape, **kwargs) for _ in range(shape.layers))
        angles = torch.outer(
            torch.arange(shape.tokens, device=device),
            1e6 ** -(torch.arange(0, shape.head_size, 2, device=device) / shape.head_size),
        )
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos().to(dtype))
        self.register_buffer("sin", angles.sin().to(dtype))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        x = x * 1.0  # as from an embedding: the first input is the model's own
        for layer in self.layers:
            x = self.run_layer(layer, x, cos, sin)
        return (x.to(target.dtype) * target).sum()


def batch_of(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """``x``, which needs a gradient, and ``target`` in fp32, for :class:`Decoder`."""
    sizes = (shape.batch, shape.tokens, shape.hidden)
    return torch.randn(sizes, device=device, dtype=dtype, requires_grad=True), torch.randn(sizes, device=device)
