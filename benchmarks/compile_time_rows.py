"""What the rows of benchmarks.compile_time train: models of transformers, random weights, one packed batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.end_to_end_rows import Size, Workload, llama_lora, packed_model, qwen3_bf16


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
    "8b-offload": Row(qwen3_8b, {"offload": "checkpoints"}),
}
