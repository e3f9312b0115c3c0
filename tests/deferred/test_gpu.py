"""On a GPU: memory, streams and captured graphs."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.deferred.head import Elementwise, Head, Term
from glue_compiler.deferred.tensor import defer
from glue_compiler.errors import GlueDeferredError
from tests.deferred.logits import is_deferred

pytestmark = pytest.mark.gpu

HEAD = Head((Term(),), (Elementwise("cast", dtype=torch.float32),))
ROWS, WORDS, HIDDEN = 4096, 32_000, 256


def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(WORDS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    return rows.requires_grad_(), weight.requires_grad_()


def test_unread_logits_take_no_memory():
    rows, weight = _operands()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = defer(HEAD, [rows], [weight])
    shifted = logits[:-1].contiguous().detach()
    assert is_deferred(shifted)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    torch.testing.assert_close(
        logits[-1].detach() + 0, (rows[-1:] @ weight.T).float()[0].detach(), rtol=1e-2, atol=1e-1
    )
    assert torch.cuda.max_memory_allocated() - before < ROWS * WORDS


@pytest.mark.parametrize("first", ["own", "other"])
def test_another_stream_reads_what_was_computed(first):
    rows, weight = _operands()
    expected = HEAD.logits([rows], [weight]).detach()
    logits = defer(HEAD, [rows], [weight]).detach()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    streams = [torch.cuda.current_stream(), other]
    results = []
    for stream in streams if first == "own" else reversed(streams):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            results.append(logits + 0)
    torch.cuda.synchronize()
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-1)


def test_logits_made_in_a_capture_are_made_by_each_replay():
    rows, weight = (tensor.detach() for tensor in _operands())
    defer(HEAD, [rows], [weight]) + 0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = defer(HEAD, [rows], [weight])
    assert type(logits) is torch.Tensor
    rows.mul_(2.0)
    graph.replay()
    torch.testing.assert_close(logits, HEAD.logits([rows], [weight]), rtol=1e-2, atol=1e-1)


def test_a_first_read_in_a_capture_is_an_error():
    rows, weight = (tensor.detach() for tensor in _operands())
    logits = defer(HEAD, [rows], [weight])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(GlueDeferredError, match="captured"), torch.cuda.graph(graph):
        logits.sum()


def test_a_kernel_gets_no_address():
    logits = defer(HEAD, *([tensor] for tensor in _operands()))
    with pytest.raises(RuntimeError, match="no memory of their own"):
        torch.Tensor.data_ptr(logits)
