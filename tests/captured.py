"""What tests of passes compile and compare; the passes that most of them do not look at are off."""

from __future__ import annotations

from typing import Any

import torch

from glue_compiler.pipeline import registry
from glue_compiler.testing import count_ops as count
from tools.compiled import Run, compile_and_keep

__all__ = ["Run", "assert_same_bits", "compile_and_keep", "compile_with_glue", "count", "result_and_gradients"]


def compile_with_glue(fn: Any, **how: Any) -> Run:
    """``compile_and_keep``; passes that take from a graph what most tests look for in it, drop_padding, which comes
    first, and group_experts and roll_loops, which let Dynamo capture more, are off unless ``passes`` says otherwise.
    """
    quiet = {
        "trace_vmap",
        "memoize_metadata",
        "specialize_attention",
        "chunk_loss",
        "group_experts",
        "roll_loops",
        "sum_embedding_grads",
        "drop_padding",
    }
    off = dict.fromkeys(quiet & set(registry.pass_names()), False)
    return compile_and_keep(fn, **{**how, "passes": {**off, **how.get("passes", {})}})


def result_and_gradients(fn: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of ``fn`` and the gradients of all inputs that need one, for a random projection of the outputs."""
    for tensor in inputs:
        tensor.grad = None
    out = fn(*inputs)
    outputs = list(out) if isinstance(out, tuple) else [out]
    generator = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in outputs if o.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return [o.detach() for o in outputs] + [t.grad.clone() for t in inputs if t.grad is not None]


def assert_same_bits(fn: Any, compiled: Any, inputs: list[torch.Tensor]) -> None:
    """Outputs and gradients of ``compiled`` equal those of ``fn``, bit by bit."""
    expected = result_and_gradients(fn, inputs)
    actual = result_and_gradients(compiled, inputs)
    assert len(expected) == len(actual)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
