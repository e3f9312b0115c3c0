"""torchtitan's own trainer, small and on a CPU: ``python -m tests.stacks.torchtitan_on_a_cpu --model.name llama3 ...``.

What is changed of torch is what a CPU lacks. torchtitan itself runs as it is, two layers of each model.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

MEMORY = SimpleNamespace(total_memory=2**30)


def counted(ids: torch.Tensor, bins: int, min: int, max: int) -> torch.Tensor:
    """torch.histc, which counts no integers on a CPU."""
    return (ids.reshape(-1, 1) == torch.arange(bins)).sum(0)


def pretend_to_be_a_card() -> None:
    os.environ["LOCAL_RANK"] = "0"  # all ranks share the one CPU
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.histc = counted
    lacking: dict[str, Any] = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_name": lambda device: "cpu",
        "get_device_properties": lambda device: MEMORY,
        "memory_stats": lambda device: {},
        "reset_peak_memory_stats": lambda: None,
        "set_device": lambda device: None,
    }
    for name, function in lacking.items():
        setattr(torch.cpu, name, function)
    divide = FSDPModule.set_gradient_divide_factor

    def divided(self: FSDPModule, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)  # gloo scales nothing while it adds
        divide(self, factor)

    FSDPModule.set_gradient_divide_factor = divided


def main() -> None:
    pretend_to_be_a_card()
    from torchtitan import train
    from torchtitan.models import llama3, moe, qwen3

    moe.utils.generate_permute_indices = functools.partial(moe.kernels.generate_permute_indices, use_cpu=True)
    for shapes in (llama3.llama3_args["debugmodel"], qwen3.qwen3_args["debugmodel_moe"]):
        shapes.n_layers = 2
    experts = qwen3.qwen3_args["debugmodel_moe"].moe_args
    experts.num_experts, experts.top_k, experts.use_grouped_mm = 4, 2, False
    train.main(train.Trainer)


if __name__ == "__main__":
    main()
