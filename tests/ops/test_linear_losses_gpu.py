"""Operators over linear logits on a GPU: wide rows through the kernels, memory, synchronisation, CUDA graphs."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from glue_compiler.ops import loss_chunks
from glue_compiler.ops.loss_chunks import ChunkLimits
from tests.ops.conftest import relative_error
from tests.ops.linear_losses import IGNORED, Head, glue

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDE = {"aligned": 32_768, "odd": 50_257}
ALL = [True] * 5


@pytest.fixture(autouse=True)
def _several_chunks_in_poisoned_memory(monkeypatch):
    """What was never written is NaN: columns beside the logits must not get into any product."""
    monkeypatch.setitem(loss_chunks.LIMITS, "cuda", ChunkLimits(16 * 2**20, 64, 64))
    poison = torch.full((2**27,), float("nan"), device="cuda")
    del poison


def wide(dtype, classes, **how):
    head = Head.random("cuda", dtype, rows=700, classes=classes, widths=(64,), **how)
    with torch.no_grad():
        head.weights[0].mul_(0.3)
    return head


@pytest.mark.parametrize("classes", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("how", [{}, {"scale": 0.3, "softcap": 10.0}, {"bias": True}], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loss_and_gradients_are_no_further_from_float64_than_eager(dtype, classes, how, smoothing):
    head = wide(dtype, classes, **how)
    exact = head.to(torch.float64)
    reference = exact.eager(torch.float64, smoothing=smoothing)
    loss, predictions, _ = head.fused(torch.float32, smoothing=smoothing, predictions=True)
    eager = head.eager(torch.float32, smoothing=smoothing)
    # The loss is one mean of the roundings of 700 rows, which may fall either way.
    roundings = max(1e-6, torch.finfo(dtype).eps / (4 * 700**0.5))
    assert relative_error(loss, reference) <= relative_error(eager, reference) + roundings
    ours, theirs, best = (
        head.gradients(loss, 1024.0), head.gradients(eager, 1024.0), exact.gradients(reference, 1024.0)
    )  # fmt: skip
    for value, other, expected in zip(ours, theirs, best, strict=True):
        assert relative_error(value, expected) <= 1.05 * relative_error(other, expected) + 2e-6
    if not how:
        assert torch.equal(predictions, head.scores().argmax(1))


@pytest.mark.parametrize("classes", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_statistics_and_their_gradients(dtype, classes):
    head = wide(dtype, classes)
    exact = head.to(torch.float64)

    def run(head):
        arguments = (head.rows, head.weights, head.bias, head.target, 1.0, 0.0, head.rows[0].dtype)
        results = glue.linear_row_statistics(*arguments, ALL, False)
        total = sum((result * torch.sin(torch.arange(700, device="cuda"))).sum() for result in results[:4])
        return results, head.gradients(total)

    (found, gradients), (expected, best) = run(head), run(exact)
    # Logits are rounded to the operands' dtype; what comes after is not.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for value, reference in zip((*found[:4], *gradients[:2]), (*expected[:4], *best[:2]), strict=True):
        assert relative_error(value, reference) < tolerance


def test_class_weights_with_smoothing_run_without_the_kernel():
    head, weight = wide(torch.float32, 1000), torch.rand(1000, device="cuda")
    exact = head.to(torch.float64)
    loss = head.fused(torch.float32, class_weight=weight, smoothing=0.1)[0]
    expected = exact.eager(torch.float64, class_weight=weight, smoothing=0.1)
    for value, reference in zip(head.gradients(loss), exact.gradients(expected), strict=True):
        assert relative_error(value, reference) < 1e-5


def step(head):
    loss = head.fused(torch.float32, predictions=True)[0]
    found = glue.linear_row_statistics(head.rows, head.weights, None, head.target, 1.0, 0.0, torch.float32, ALL, False)
    return [loss, *head.gradients(loss), *head.gradients(sum(each.sum() for each in found[:4]))]


def test_nothing_waits_for_the_host():
    head = wide(torch.bfloat16, 50_257)
    step(head)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(head)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_runs_give_equal_bits():
    head = wide(torch.bfloat16, 50_257)
    assert all(map(torch.equal, step(head), step(head)))


def test_logits_of_all_rows_never_exist():
    head = wide(torch.bfloat16, 32_768)
    step(head)

    def peak(run):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    rows = 700 * 32_768 * 2
    assert peak(lambda: head.gradients(head.eager(torch.float32))) > 2 * rows
    # One chunk, and a float32 sum, which takes the place of the chunk when it is rounded.
    sums = head.weights[0].numel() * 4
    assert peak(lambda: head.gradients(head.fused(torch.float32)[0])) < 16 * 2**20 + sums + 2**20


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled(backend):
    torch._dynamo.reset()

    def loss(rows, weight, target):
        return glue.linear_cross_entropy(
            [rows], [weight], None, target, None, "mean", IGNORED, 0.0, 1.0, 0.0, torch.float32,
            [True, True, False], False,
        )[0]  # fmt: skip

    head = wide(torch.bfloat16, 50_257)
    value = torch.compile(loss, backend=backend, fullgraph=True)(head.rows[0], head.weights[0], head.target)
    for found, expected in zip(head.gradients(value), head.gradients(head.fused(torch.float32)[0]), strict=True):
        assert torch.equal(found, expected)


def test_a_cuda_graph_replays_them():
    head = wide(torch.bfloat16, 50_257)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(head)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(head)
    with torch.no_grad():
        head.rows[0].copy_(torch.randn_like(head.rows[0]))
    graph.replay()
    assert all(map(torch.equal, captured, step(head)))


def test_a_target_out_of_bounds_asserts_on_the_device():
    script = textwrap.dedent("""
        import sys, torch
        from tests.ops.linear_losses import Head
        head = Head.random("cuda", torch.bfloat16)
        head.target[7] = int(sys.argv[1])
        head.fused(torch.float32)
        torch.cuda.synchronize()
    """)

    def run(target):
        command = [sys.executable, "-c", script, str(target)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run(69).returncode == 0
    for wrong in (70, -1):
        failed = run(wrong)
        assert failed.returncode != 0
        assert "out of bounds" in failed.stdout + failed.stderr
