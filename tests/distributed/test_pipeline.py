"""Pipeline stages, each compiled, with the microbatches of torch's schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

from tests.distributed.training import Compiles, counts_of

ROWS, TOKENS, WIDTH, CLASSES = 4, 12, 8, 4096


class Stage(nn.Module):
    """Half of a decoder: two blocks that build the mask of packed documents from positions; the last has a head."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 3)

        self.blocks = nn.ParameterList([weight(3 * WIDTH, WIDTH) for _ in range(2)])
        self.head = weight(CLASSES, WIDTH) if number else None

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for block in self.blocks:
            documents = (positions == 0).cumsum(-1)
            mask = (documents[:, :, None] == documents[:, None]).tril()[:, None]
            q, k, v = linear(x, block).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            x = x + scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return x if self.head is None else linear(x, self.head)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    positions = torch.arange(TOKENS).remainder(3 + step).expand(ROWS, -1).contiguous()
    return x, positions, torch.randint(CLASSES, (ROWS, TOKENS), generator=generator)


SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def trains(schedule: str) -> dict[str, int]:
    """Two stages beside one process with both; what glue did to this rank's."""
    rank = dist.get_rank()
    compiles = Compiles({"compiler": "aot_eager"}, None)
    module, both = Stage(rank), [Stage(0), Stage(1)]
    stage = PipelineStage(compiles.in_place(module), rank, 2, torch.device("cpu"))
    run: Any = SCHEDULES[schedule](stage, n_microbatches=2, loss_fn=loss_of)
    for step in range(2):
        x, positions, targets = batch(step)
        losses: list[Tensor] = []
        if rank == 0:
            run.step(x, positions=positions)
        else:
            run.step(target=targets, losses=losses, positions=positions)
        halves = zip(x.chunk(2), positions.chunk(2), targets.chunk(2), strict=True)
        expected = [loss_of(both[1](both[0](h, p), p), t) for h, p, t in halves]
        (sum(expected) / 2).backward()
        if rank == 1:
            torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
        for got, want in zip(module.parameters(), both[rank].parameters(), strict=True):
            assert got.grad is not None
            torch.testing.assert_close(got.grad, want.grad)
        for each in (module, *both):  # a schedule divides what was there before, too
            each.zero_grad()
    return counts_of(compiles.session)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_of_two_stages(two_ranks, schedule):
    for counts in two_ranks.run(trains, schedule):
        assert counts.get("specialize_attention.packed", 0) + counts.get("specialize_attention.listed", 0) > 0
