"""Shared by the operator tests: devices, routings, and the loop over experts that every operator is compared with."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from glue_compiler.ops.batch_memo import PrologueResults, memoized


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


_ON_GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)


@pytest.fixture(params=["cpu", _ON_GPU])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@dataclasses.dataclass
class Routing:
    """What the loop over experts does, by hand."""

    ids: Tensor
    num_experts: int

    def rows_of(self, expert: int) -> tuple[Tensor, Tensor]:
        """(position, token) of the expert's slots, in the order of the loop."""
        return torch.where(self.ids.t() == expert)

    def offsets(self) -> Tensor:
        counts = torch.stack([(self.ids == expert).sum() for expert in range(self.num_experts)])
        return counts.cumsum(0).int()

    def layer(self, x: Tensor, weight: Tensor, bias: Tensor | None, routing_weights: Tensor) -> Tensor:
        """sum over slots of routing weight * (x @ weight.T + bias), one expert after the other."""
        out = x.new_zeros(x.shape[0], weight.shape[1])
        for expert in range(self.num_experts):
            position, token = self.rows_of(expert)
            rows = x[token] @ weight[expert].t()
            if bias is not None:
                rows = rows + bias[expert]
            out = out.index_add(0, token, rows * routing_weights[token, position, None])
        return out


def _random_ids(tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Ids in [-1, num_experts + 1), so sentinels on both sides, with one expert that nobody chose."""
    ids = torch.randint(-1, num_experts + 1, (tokens, top_k))
    return torch.where(ids == 1, 0, ids) if num_experts > 1 else ids


ROUTINGS = {
    "some experts empty, sentinels": (23, 3, 5),
    "one expert": (9, 2, 1),
    "one slot per token": (17, 1, 4),
    "more experts than slots": (3, 2, 12),
    "no tokens": (0, 2, 3),
    "one token": (1, 1, 2),
}


@pytest.fixture(params=list(ROUTINGS))
def routing(request: pytest.FixtureRequest, device: str) -> Routing:
    tokens, top_k, num_experts = ROUTINGS[request.param]
    return Routing(_random_ids(tokens, top_k, num_experts).to(device), num_experts)


@pytest.fixture
def ragged(device: str) -> Routing:
    """One routing with an empty expert and sentinels, where one is enough."""
    return Routing(_random_ids(23, 3, 5).to(device), 5)


def relative_error(value: Tensor, reference: Tensor) -> float:
    if reference.numel() == 0:
        return 0.0
    reference = reference.double().cpu()
    norm = reference.norm().item()
    return ((value.double().cpu() - reference).norm() / (norm or 1.0)).item()


# float32 within a few roundings; 16-bit types within the rounding of their operands.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}


@pytest.fixture
def close() -> object:
    def check(value: Tensor, reference: Tensor) -> None:
        assert value.shape == reference.shape
        assert not value.isnan().any()
        error = relative_error(value, reference)
        assert error <= TOLERANCE[value.dtype], f"relative error {error:.2e} for {value.dtype}"

    return check


class Memoized:
    """A memoized function of one integer tensor: its values doubled, their sum, and how often that was computed."""

    def __init__(self):
        self.memo, self.computed = PrologueResults(), 0
        self.call = memoized(lambda positions, doubled, total: (doubled, total), self.prologue, (0,), self.memo)

    def prologue(self, positions):
        self.computed += 1
        return positions * 2, int(positions.sum())

    def __call__(self, positions):
        doubled, total = self.call(positions)
        assert torch.equal(doubled, positions * 2)
        assert total == int(positions.sum())
        return doubled


@pytest.fixture
def memoized_double():
    return Memoized()
