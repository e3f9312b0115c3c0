"""share_layers under Inductor, in fp64 against eager: what a body takes stays as it is, and its sizes are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glue_compiler.testing import capture, run_pass
from tests.captured import compile_with_glue
from tests.passes.share_layers.models import Layers, ids, layers, step


class OneWeight(nn.Module):
    """Layers of one weight, so that backward may overwrite nearly all that it takes; all read one table."""

    def __init__(self, count: int = 14, twice: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) / 3)
        self.count, self.twice = count, twice

    def forward(self, x):
        if self.twice:  # of twice as many rows as the input
            x = torch.cat([x, x.sin()])
        table = (x.detach() @ self.weight).sin()
        for _ in range(self.count):
            y = x @ self.weight
            x = torch.tanh(y * table) * torch.sigmoid(y) + torch.exp(-y.square()) * table + x
        return x


def compare(model, *inputs, **options):
    """With eager, in fp64; returns the pass's report."""
    model = model.double()
    run = compile_with_glue(model, compiler="inductor", fx_graph_cache=False, **options)
    for each in inputs:
        for got, want in zip(step(model, run.call, each), step(model, model, each), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    return run.session.graphs[-1].passes[-1]


def rows(count):
    return torch.linspace(-1, 1, 8 * count, dtype=torch.float64).view(count, 8)


@pytest.mark.slow
def test_bodies_do_not_overwrite_what_they_take():
    assert compare(OneWeight(), rows(8)).counts["bodies"] >= 1


@pytest.mark.slow
def test_bodies_know_sizes_that_none_of_their_operands_has():
    report = compare(OneWeight(twice=True), rows(5), rows(7), dynamic=True)
    assert report.counts["bodies"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"), [({"cpp_wrapper": True}, "cpp_wrapper"), ({"triton.cudagraphs": True}, "CUDA graphs")]
)
def test_ways_of_inductor_without_bodies(options, reason):
    (pair,) = capture(Layers(layers()), ids(), stage="partitioned")
    run = run_pass(pair, "share_layers", **options)
    assert not run.report.changed
    assert any(reason in each for each in run.skip_reasons)


class Convolution(nn.Module):
    def __init__(self, kind, norm) -> None:
        super().__init__()
        self.convolution, self.norm = kind(4, 4, 3, padding=1), norm(4)

    def forward(self, h):
        z = self.norm(self.convolution(h))
        return h + (z.sin() * z.cos() + z.sigmoid() * z.tanh()) * ((z * 0.5).exp() + z.abs()).rsqrt()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "norm", "shared"), [(nn.Conv2d, nn.BatchNorm2d, False), (nn.Conv1d, nn.BatchNorm1d, True)]
)
def test_layers_with_convolutions(kind, norm, shared):
    model = nn.Sequential(*[Convolution(kind, norm) for _ in range(8)])
    x = torch.randn(2, 4, 5, 5) if kind is nn.Conv2d else torch.randn(2, 4, 5)
    for compiler, expected in (("aot_eager", True), ("inductor", shared)):
        (pair,) = capture(model, x, stage="partitioned")
        run = run_pass(pair, "share_layers", compiler=compiler)
        assert bool(run.report.counts["bodies"]) is expected
        assert any("convolution" in reason for reason in run.skip_reasons) is not expected
