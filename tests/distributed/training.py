"""Training on several ranks, whose batches have other lengths, beside one process that has all of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from glue_compiler.backend import GlueBackend
from glue_compiler.report.session import Session
from tests.models.training import Batch, packed, tiny

LENGTHS = (
    ((7, 20, 3), (6,), (11, 2, 9)),
    ((4, 4), (29, 1), (2, 13, 6, 7)),
    ((9, 1, 2), (18,), (3, 3, 4)),
    ((26,), (2, 8), (1, 6, 13)),
)
"""Of the documents in a rank's batches, step by step; even in all, for sequences that two ranks divide."""


class Compiles:
    """Compiles modules with glue, and keeps what it does."""

    def __init__(self, options: dict[str, Any], dynamic: bool | None) -> None:
        self.session = Session()
        backend = GlueBackend(session=self.session)
        self.how: dict[str, Any] = {"backend": backend, "options": options, "dynamic": dynamic}

    def __call__(self, module: nn.Module) -> Any:
        return torch.compile(module, **self.how)

    def in_place(self, module: nn.Module) -> nn.Module:
        module.compile(**self.how)
        return module


@dataclass(frozen=True)
class Engine:
    """How a model is trained on several ranks.

    Attributes:
        prepare: (model, compiles) → what is called.
        parts: batches of a step, of which the gradients are added up.
        around: (what is called, is it the last of a step's parts?) → the context of forward and backward.
        shares: so many ranks have one batch.
        dynamic: as for torch.compile.
        steps: so many.
        tolerance: of losses, gradients and weights.
    """

    prepare: Callable[[nn.Module, Compiles], Any]
    parts: int = 1
    around: Callable[[Any, bool], Any] = lambda call, is_last: contextlib.nullcontext()
    shares: int = 1
    dynamic: bool | None = None
    steps: int = 3
    tolerance: float = 1e-10


@dataclass
class Trained:
    """What a rank saw: the loss and the gradients of each step, the weights at the end, and what glue did."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    skips: set[str] = field(default_factory=set)
    graphs: int = 0


def batches_of(rank: int, step: int, parts: int) -> list[Batch]:
    """Of one step: what there is for it, and for the ones after it."""
    steps = [(step + part) % len(LENGTHS[rank]) for part in range(parts)]
    return [packed(LENGTHS[rank][i], seed=10 * rank + i) for i in steps]


def _model(kind: str, settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return tiny(kind, **settings)


@functools.cache
def reference(replicas: int, kind: str = "qwen3", parts: int = 1, steps: int = 3, **settings: Any) -> Trained:
    """What one eager process learns that has the batches of all replicas in one row."""
    model = _model(kind, settings)
    rows = []
    for step in range(steps):
        batches = [batch for rank in range(replicas) for batch in batches_of(rank, step, parts)]
        rows.append([{name: torch.cat([batch[name] for batch in batches], dim=1) for name in batches[0]}])
    return _train(Engine(lambda model, _: model), model, model, rows, rows)


def train(engine: Engine, kind: str, options: dict[str, Any], settings: dict[str, Any]) -> Trained:
    """What this rank sees."""
    compiles = Compiles({"compiler": "aot_eager", **options}, engine.dynamic)
    model = _model(kind, settings)
    call = engine.prepare(model, compiles)
    replicas = dist.get_world_size() // engine.shares
    steps = [[batches_of(rank, step, engine.parts) for rank in range(replicas)] for step in range(engine.steps)]
    mine = [each[dist.get_rank() // engine.shares] for each in steps]
    found = _train(engine, model, call, mine, [list(itertools.chain(*each)) for each in steps], replicas)
    for graph in compiles.session.graphs:
        found.skips.update(f"{report.name}: {skip.reason}" for report in graph.passes for skip in report.skips)
    found.counts, found.graphs = counts_of(compiles.session), len(compiles.session.graphs)
    return found


def counts_of(session: Session) -> dict[str, int]:
    """What was rewritten, over all graphs; no pass failed."""
    counts: Counter[str] = Counter()
    for graph in session.graphs:
        for report in graph.passes:
            assert report.error is None, report.error
            counts.update({f"{report.name}.{name}": count for name, count in report.counts.items()})
    return dict(counts)


def _train(
    engine: Engine,
    model: nn.Module,
    call: Any,
    steps: list[list[Batch]],
    all_steps: list[list[Batch]],
    replicas: int = 1,
) -> Trained:
    """``all_steps``: the batches of all replicas."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = Trained()
    for batches, of_all in zip(steps, all_steps, strict=True):
        # The engines take the mean over replicas; each token counts once.
        tokens = sum((batch["labels"] >= 0).sum() for batch in of_all)
        losses = []
        for i, batch in enumerate(batches):
            with engine.around(call, i == len(batches) - 1):
                loss = call(**batch, num_items_in_batch=tokens).loss * replicas
                loss.backward()
            losses.append(loss.detach())
        found.losses.append(_whole(sum(losses)))
        found.gradients.append({name: None if p.grad is None else _whole(p.grad) for name, p in _named(model)})
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {name: _whole(p.detach()) for name, p in _named(model)}
    return found


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.replace("_orig_mod.", "").removeprefix("module."), p) for name, p in model.named_parameters()]


def _whole(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def assert_same(found: list[Trained], expected: Trained, engine: Engine) -> None:
    """The losses of all ranks, each one's gradients and weights are those of one process."""
    for step, want in enumerate(expected.losses):
        got = torch.stack([each.losses[step] for each in found[:: engine.shares]]).mean()
        assert _is_close(got, want, engine.tolerance)
    for each in found:
        for got, want in zip([*each.gradients, each.weights], [*expected.gradients, expected.weights], strict=True):
            assert len(want) > 10
            assert {name for name in got if got[name] is not None} == {name for name in want if want[name] is not None}
            different = [
                name
                for name in want
                if want[name] is not None and not _is_close(got[name], want[name], engine.tolerance)
            ]
            assert not different


def _is_close(got: Any, want: Any, tolerance: float) -> bool:
    return torch.allclose(got.double(), want.double(), rtol=tolerance, atol=tolerance)
