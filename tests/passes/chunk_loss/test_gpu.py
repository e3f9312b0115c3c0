"""On a GPU: a whole training step of which nobody reads the logits never makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.end_to_end_rows import TINY, Size, packed_model
from glue_compiler.ops import loss_chunks
from tests.deferred.logits import is_deferred

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TOKENS, WORDS = 4096, 1024


def allocations(call: Callable[[], Any]) -> list[int]:
    """Bytes of each piece of memory that ``call`` asks torch's allocator for."""
    torch.cuda.memory._record_memory_history(context=None)
    try:
        call()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return [event["size"] for device in events for event in device if event["action"] == "alloc"]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_no_piece_of_memory_is_as_large_as_the_logits(family, monkeypatch):
    """All is small, the vocabulary too: hidden states are 64 numbers a token, what FlashAttention adds up in backward
    128 in fp32, and logits 1,024."""
    monkeypatch.setitem(TINY, "vocab_size", WORDS)
    monkeypatch.setattr("glue_compiler.passes.chunk_loss.analysis.pays", lambda *_: True)
    monkeypatch.setitem(loss_chunks.LIMITS, "cuda", loss_chunks.ChunkLimits(2**18, 64, 64))
    workload = packed_model(family, Size(TOKENS, TOKENS, None, is_tiny=True), "cuda", "sdpa")
    optimizer = torch.optim.AdamW(workload.model.parameters(), fused=True)
    call = torch.compile(workload.model, backend="glue")
    batch = workload.batch(TOKENS, torch.Generator().manual_seed(0))

    def step() -> None:
        output = call(**batch)
        assert is_deferred(output.logits)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    logits = TOKENS * WORDS * 2  # in bf16
    assert 0 < max(allocations(step)) < logits
    assert max(allocations(lambda: call(**batch).logits.sum())) >= logits
