"""Steps of transformers' models on a GPU: a loss, every gradient and the memory at the peak, each way of compiling."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.end_to_end_rows import ROWS, Size
from tests.captured import Run, compile_and_keep


@dataclass
class Step:
    """``peak``: bytes that a second step allocated at its peak, beyond what was there before it."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    peak: int
    run: Run | None

    def counts(self, name: str) -> Counter[str]:
        """Of a pass, in all graphs together (peft's hook on the embedding breaks the graph behind it)."""
        assert self.run is not None
        found = Counter[str]()
        for graph in self.run.session.graphs:
            for each in graph.passes:
                if each.name == name:
                    found.update(each.counts)
        return found


class Steps:
    """Ways to run one step of one of ``benchmarks.end_to_end``'s rows, with few of its layers."""

    def __init__(self, row: str, layers: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.workload = ROWS[row].build(Size(tokens, tokens, layers, False), "cuda", "sdpa")
        for weight in self.workload.model.parameters():
            if not weight.any():  # of LoRA: others would have no gradient
                torch.nn.init.normal_(weight, std=0.02)
        self.batch = self.workload.batch(tokens, torch.Generator().manual_seed(0))

    def exact(self) -> Step:
        """Eager, in fp32."""
        model = copy.deepcopy(self.workload.model).float()
        return self._step(model, model, None)

    def compiled(self, **options: Any) -> Step:
        torch._dynamo.reset()
        run = compile_and_keep(self.workload.model, compiler="inductor", fullgraph=False, **options)
        self._step(self.workload.model, run.call, run)
        return self._step(self.workload.model, run.call, run)

    def _step(self, model: Any, call: Any, run: Run | None) -> Step:
        torch.manual_seed(0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = call(**self.batch).loss
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        model.zero_grad()
        return Step(loss.detach(), gradients, peak, run)


def assert_as_close(got: Step, exact: Step, other: Step) -> None:
    """Loss and gradients of ``got`` are as close to ``exact`` as those of ``other``, within a factor of two."""
    assert {name for name, each in got.gradients.items() if each is None} == {
        name for name, each in exact.gradients.items() if each is None
    }
    pairs = [("loss", got.loss, other.loss, exact.loss)]
    pairs += [(name, got.gradients[name], other.gradients[name], want) for name, want in exact.gradients.items()]
    for name, one, two, want in pairs:
        if want is not None:
            allowed = 2 * _error(two, want) + 1e-3
            assert _error(one, want) <= allowed, f"{name}: {_error(one, want):.2e}, and {_error(two, want):.2e}"


def _error(got: Tensor | None, want: Tensor) -> float:
    assert got is not None
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
