"""What the rows of benchmarks.compile_time train: models of transformers, random weights, one packed batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.end_to_end_rows import Size, Workload, llama_lora, packed_model, qwen3_bf16
from benchmarks.expert_routing_layers import LAYERS, ModuleListLayer, small


@dataclass(frozen=True)
class Row:
    """``build``: (size, device, attention) → what is trained. ``options``: glue's, for the variants that are glue."""

    build: Callable[[Size, str, str], Workload]
    options: Mapping[str, Any] = field(default_factory=dict)


def qwen3_moe(size: Size, device: str, attention: str) -> Workload:
    """Qwen3-30B-A3B's shape, 48 layers of 128 experts; all but the norms and routers are frozen, to fit on one GPU."""
    workload = packed_model("qwen3_moe", size, device, attention)
    _freeze(workload.model, lambda name: "norm" in name or name.endswith("gate.weight"))
    return workload


class HitExperts(ModuleListLayer):
    """Its loop is over the experts that are hit, as transformers 4.57 writes it (Qwen3MoeSparseMoeBlock)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        weights, selected = self.gate(tokens).float().softmax(-1).topk(self.shape.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        result = torch.zeros_like(tokens)
        mask = F.one_hot(selected, self.shape.experts).permute(2, 1, 0)
        for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = self.experts[number]
            slot, token = torch.where(mask[number].squeeze(0))
            rows = tokens[None, token].reshape(-1, tokens.shape[-1])
            result.index_add_(0, token, (expert(rows) * weights[token, slot, None]).to(tokens.dtype))
        return result.view_as(hidden_states)


def expert_loop(size: Size, device: str, attention: str) -> Workload:
    """The same shape and what of it is trained, with 128 modules in each layer, and a loop over those that are hit."""
    workload = packed_model("qwen3_30b", size, device, attention)
    experts = small(LAYERS["qwen3"]) if size.is_tiny else LAYERS["qwen3"]
    shape = dataclasses.replace(experts.shape, hidden=workload.config.hidden_size)
    for layer in workload.layers:
        with torch.device(device):
            layer.mlp = HitExperts(shape).bfloat16()
    _freeze(workload.model, lambda name: "norm" in name or name.endswith("mlp.gate.weight"))
    return workload


def qwen3_8b(size: Size, device: str, attention: str) -> Workload:
    """Qwen3-8B's shape, checkpointed; the checkpoints' inputs wait in host memory. All but the norms are frozen."""
    workload = packed_model("qwen3_8b", size, device, attention)
    workload.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _freeze(workload.model, lambda name: "norm" in name)
    return workload


def _freeze(model: nn.Module, trains: Callable[[str], bool]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))


ROWS = {
    "qwen3": Row(qwen3_bf16),
    "llama-lora": Row(llama_lora),
    "qwen3-moe": Row(qwen3_moe),
    "expert-loop": Row(expert_loop),
    "8b-offload": Row(qwen3_8b, {"offload": "checkpoints"}),
}


def build(name: str, layers: int | None, tokens: int | None, device: str) -> tuple[Workload, dict[str, Tensor]]:
    """A row of ``ROWS`` and its first batch; tiny on a CPU."""
    is_tiny = device == "cpu"
    tokens = tokens or (128 if is_tiny else 8192)
    torch.manual_seed(0)
    workload = ROWS[name].build(Size(tokens, tokens, layers, is_tiny), device, "sdpa")
    return workload, workload.batch(tokens, torch.Generator().manual_seed(0))
