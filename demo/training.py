"""One training run, and what was seen while it ran."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.profiler import ProfilerActivity, profile

from demo.packed_model import Batch

# Without it, torch's profiler writes lines of its own between those of the progress bar.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

LEARNING_RATE = 3e-3
WARM_UP_STEPS = 2


@dataclass
class Run:
    """Losses and times of one run; the counts are of one forward and backward pass after it.

    Attributes:
        backend: a ``torch.compile`` backend, or ``"eager"`` for none.
        step_seconds: forward, backward and optimizer. The first step includes the compile.
        host_reads: calls of ``aten::_local_scalar_dense``, which is what ``.item()`` does.
        nonzeros: calls of ``aten::nonzero``.
        graphs: graphs that Dynamo handed to the backend.
        graph_breaks: as Dynamo counts them; frames that it gave up on count for nothing.
    """

    backend: str
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    host_reads: int = 0
    nonzeros: int = 0
    graphs: int = 0
    graph_breaks: int = 0

    @property
    def first_step_seconds(self) -> float:
        return self.step_seconds[0]

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds[WARM_UP_STEPS:] or self.step_seconds)

    def seconds_until(self, step: int) -> float:
        """The first steps as they were, with what is compiled in them, and the others at the median time."""
        first = self.step_seconds[:WARM_UP_STEPS]
        return sum(first) + (step - len(first)) * self.median_step_seconds

    def max_loss_difference(self, other: Run) -> float:
        """The largest difference at any step; NaN where a loss is."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    backend: str,
    options: dict[str, Any] | None = None,
    on_step: Callable[[float], None] = lambda loss: None,
) -> Run:
    """Train ``model`` on ``batches``, compiled by ``backend`` from cold caches, one step a batch.

    Args:
        options: the backend's, as in ``torch.compile(options=...)``.
        on_step: called with each step's loss.
    """
    run = Run(backend)
    torch._dynamo.reset()
    counters.clear()
    forward = model if backend == "eager" else torch.compile(model, backend=backend, options=options)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    with fresh_cache():
        for batch in batches:
            start = time.perf_counter()
            loss = forward(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())  # waits for the device, so that the time is the whole step's
            run.step_seconds.append(time.perf_counter() - start)
            on_step(run.losses[-1])
        # A batch that glue has not met: of one that it has, it remembers the metadata.
        batch = {name: value.clone() for name, value in batches[-1].items()}
        calls = _operator_calls(lambda: forward(**batch).loss.backward())
    run.host_reads = calls.get("aten::_local_scalar_dense", 0)
    run.nonzeros = calls.get("aten::nonzero", 0)
    run.graphs = counters["stats"]["unique_graphs"]
    run.graph_breaks = sum(counters["graph_break"].values())
    return run


def _operator_calls(work: Callable[[], None]) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    return {event.key: event.count for event in profiler.key_averages()}
