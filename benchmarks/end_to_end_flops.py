"""How many operations a training step needs, and how many a card can do.

The operations are the model's, as reports of model FLOPs utilisation count them (PaLM, arXiv:2204.02311, appendix B):
products with weights and those of attention, forward once and backward twice, or once where a weight is frozen. What a
checkpoint computes again is not counted, nor what a mask hides.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from benchmarks.end_to_end_rows import Workload


def step_flops(workload: Workload, lengths: list[int]) -> float:
    """Of forward and backward over documents of these lengths; padding counts for nothing."""
    of_token = flops_of_weights(workload) if workload.token_flops is None else workload.token_flops
    return of_token * sum(lengths) + _flops_of_attention(workload, lengths)


def flops_of_weights(workload: Workload) -> float:
    """For one token."""
    config = workload.config
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    share = getattr(config, "num_experts_per_tok", 1) / experts
    products = {weight for module in workload.model.modules() for weight in _weights_of_products(module)}
    return sum(
        2.0 * _elements(weight) * (share if weight.dim() == 3 else 1) * (3 if weight.requires_grad else 2)
        for weight in products
    )


def _elements(weight: nn.Parameter) -> int:
    return weight.numel() * (2 if weight.dtype == torch.uint8 else 1)  # weights of 4 bits lie two in a byte


def _weights_of_products(module: nn.Module) -> list[nn.Parameter]:
    if isinstance(module, nn.Embedding):
        return []
    return [weight for weight in module.parameters(recurse=False) if weight.dim() in (2, 3)]


def _flops_of_attention(workload: Workload, lengths: list[int]) -> float:
    config = workload.config
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    window = getattr(config, "sliding_window", None)
    pairs = sum(
        _seen_pairs(length, window if kind == "sliding_attention" else None)
        for kind in kinds[:layers]
        for length in lengths
    )
    return 3 * 2 * 2.0 * config.num_attention_heads * config.head_dim * pairs


def _seen_pairs(length: int, window: int | None) -> int:
    """Of a query and a key at or before it, at most ``window`` keys for each query."""
    window = min(window or length, length)
    return window * (window + 1) // 2 + (length - window) * window


def peak_flops(device: str) -> float:
    """Operations a second in a product of 8192 x 8192 matrices in bf16, the best of 20."""
    one, other = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(23):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(one, other)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * 8192**3 / best
