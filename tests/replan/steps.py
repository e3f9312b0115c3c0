"""A device whose bytes are what a test says, and models that are followed on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from glue_compiler.backend import GlueBackend
from glue_compiler.replan.device_steps import Held
from glue_compiler.replan.replanner import Replanner
from glue_compiler.report.session import Session
from tests.passes.overlap_offload.models import Block, gradients

QUIET = dict.fromkeys(("memoize_metadata", "specialize_attention", "chunk_loss", "group_experts"), False)
MIB = 2**20


@dataclass
class Device:
    """``allocated`` bytes, and the most that ever were."""

    allocated: int = 0
    peak: int = 0

    def mark(self, device: torch.device) -> Held:
        return Held(self.allocated, max(self.peak, self.allocated))


class Followed:
    """A backend that follows steps on a CPU, and the reports of what it compiled."""

    def __init__(self, device: Any, **options: Any) -> None:
        passes = options.pop("passes", {})
        self.session = Session()
        self.backend = GlueBackend(session=self.session)
        self.backend.replanner = Replanner(self.backend.frames, device.mark, kinds=("cpu",))
        self.how = {
            "backend": self.backend,
            "options": {"compiler": "aot_eager", "strict": True, **options, "passes": QUIET | passes},
        }

    @property
    def plans(self) -> list[dict[str, int]]:
        """What plan_memory counted, by compile."""
        return [p.counts for graph in self.session.graphs for p in graph.passes if p.name == "plan_memory"]

    @property
    def told(self) -> list[str]:
        return [graph.replan for graph in self.session.graphs if graph.replan]


class Plain(nn.Module):
    """Blocks with no checkpoint."""

    def __init__(self, count: int = 4, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def results(call: Any, model: nn.Module, x: torch.Tensor, device: Device | None = None, peak: int = 0) -> list[Any]:
    """Output and gradients of a step, in which the device's peak grows to ``peak``."""
    model.zero_grad()
    out = call(x)
    if device is not None:
        device.peak = max(device.peak, peak)
    out.square().sum().backward()
    return [out.detach().clone(), *gradients(model)]
