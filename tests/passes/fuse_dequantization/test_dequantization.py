"""Weights of 4 bits: one kernel dequantises them, and torch multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.ops.kernel_support import runs_triton
from glue_compiler.options import GlueOptions
from glue_compiler.passes.fuse_dequantization import FuseDequantization, read
from glue_compiler.pipeline.run import Pipeline
from glue_compiler.testing import capture
from tests.captured import compile_with_glue
from tests.slow import one_in

bitsandbytes = pytest.importorskip("bitsandbytes")

ROWS, INSIDE, OUTSIDE = 24, 64, 128  # bitsandbytes on a CPU is wrong where rows are not whole blocks


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """A CPU has glue's operator, too, but no kernel of it."""
    monkeypatch.setattr(read, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(read, "LEAST_ROWS", 8)


def quantized(inside=INSIDE, outside=OUTSIDE, *, bias=False, kind="nf4", nested=True, dtype=torch.float32):
    layer = bitsandbytes.nn.Linear4bit(
        inside, outside, bias=bias, compute_dtype=dtype, quant_type=kind, compress_statistics=nested
    )
    return layer.to(dtype).to("cpu")  # which quantises


class Layers(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.up, self.down = quantized(**how), quantized(OUTSIDE, INSIDE, **how)
        self.scale = nn.Parameter(torch.ones(INSIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x * self.scale).sin())


def pair_of(model: nn.Module, x: torch.Tensor) -> TrainingPair:
    (pair,) = capture(model, x, stage="partitioned")
    return pair


def rewritten(pair: TrainingPair) -> Any:
    (report,) = Pipeline.of_one(FuseDequantization(), GlueOptions()).run_pair(pair, [FuseDequantization()])
    return report


def names_in(pair: TrainingPair) -> set[str]:
    return {str(node.target) for gm in (pair.forward, pair.backward) for node in gm.graph.nodes}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_their_gradients_dequantise_by_one_operator(nested, bias):
    pair = pair_of(Layers(nested=nested, bias=bias), torch.randn(2, ROWS, INSIDE, requires_grad=True))
    report = rewritten(pair)
    assert report.counts == {"dequantizations": 4, "products": 2}
    assert not report.skips
    assert not [name for name in names_in(pair) if name.startswith("bitsandbytes")]


@pytest.mark.parametrize("shape", [(ROWS, INSIDE), (2, ROWS, INSIDE), (2, 3, 8, INSIDE)])
@pytest.mark.parametrize("how", one_in(3, [{}, {"nested": False}, {"bias": True}, {"dtype": torch.bfloat16}]), ids=str)
def test_it_computes_what_bitsandbytes_does(shape, how):
    model = Layers(**how)
    dtype = how.get("dtype", torch.float32)
    model.scale.data = model.scale.data.to(dtype)
    found = []
    run = compile_with_glue(model, compiler="inductor", fx_graph_cache=False)
    for call in (model, run.call):
        torch.manual_seed(1)
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        model.zero_grad()
        out = call(x)
        out.square().sum().backward()
        found.append((out.detach(), x.grad, model.scale.grad, model.up.weight.grad))
    (report,) = (each for each in run.report.passes if each.name == "fuse_dequantization")
    assert report.counts["dequantizations"] == 4
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for got, want in zip(found[1], found[0], strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, **tolerance)


def test_rows_may_vary():
    model = Layers()
    run = compile_with_glue(model, compiler="inductor", fx_graph_cache=False, dynamic=True)
    for rows in (ROWS, 17, 40):
        x = torch.randn(rows, INSIDE, requires_grad=True)
        torch.testing.assert_close(run.call(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "rows", "reason"),
    [
        ({"kind": "fp4"}, ROWS, "type fp4"),
        ({}, 4, "fewer than 8 rows"),
        ({"inside": 66, "outside": 33}, ROWS, "a last block that is not full"),
    ],
    ids=str,
)
def test_what_is_left_to_bitsandbytes(how, rows, reason):
    layer, dequantised = quantized(**how), 1
    x = torch.randn(rows, layer.in_features, requires_grad=True)
    pair = pair_of(layer, x)
    report = rewritten(pair)
    assert any(reason in skip.reason for skip in report.skips)
    assert report.counts["products"] == 0
    assert report.counts["dequantizations"] == (dequantised if "rows" in reason else 0)


def test_a_cpu_has_no_kernel(monkeypatch):
    monkeypatch.setattr(read, "runs_triton", runs_triton)
    report = rewritten(pair_of(quantized(), torch.randn(ROWS, INSIDE, requires_grad=True)))
    assert not report.changed
    assert all("Triton" in skip.reason for skip in report.skips)
    assert len(report.skips) == 2


def test_scales_that_something_else_reads_are_dequantised_for_it():
    """By bitsandbytes' operator: the kernel dequantises them for itself."""
    weight = quantized().weight

    def fn(x):
        scales = bitsandbytes.functional.dequantize_blockwise(weight.quant_state.absmax, weight.quant_state.state2)
        return bitsandbytes.matmul_4bit(x, weight.t(), quant_state=weight.quant_state) * scales.sum()

    x = torch.randn(ROWS, INSIDE, requires_grad=True)
    run = compile_with_glue(fn, compiler="inductor", fx_graph_cache=False)
    torch.testing.assert_close(run.call(x), fn(x), rtol=1e-5, atol=1e-5)
