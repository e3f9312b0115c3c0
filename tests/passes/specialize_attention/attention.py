"""Attention with a mask that the test builds, through the pass alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from glue_compiler.fx import bodies
from tests.captured import Run, compile_with_glue, result_and_gradients

LENGTH = 12
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]])


@dataclass(frozen=True)
class Unknown:
    """A mask that is not classified, for a reason of this pattern.

    Attention reads it when the graph runs, and keeps it where no kernel can do that: on a CPU under Inductor.
    """

    reason: str


def specialized(fn: Any, **options: Any) -> Run:
    options = {"eager": True, **options}
    return compile_with_glue(fn, passes={"specialize_attention": True, "hoist_metadata": False}, **options)


def counts(run: Run) -> dict[str, int]:
    found = next(p for p in run.report.passes if p.name == "specialize_attention").counts
    return {form: number for form, number in found.items() if form != "nodes_erased"}


def inputs(batch: int = 1, heads: int = 2, key_heads: int = 2, length: int = LENGTH) -> list[Tensor]:
    return [
        torch.randn(batch, h, length, 16, dtype=torch.float64, requires_grad=True)
        for h in (heads, key_heads, key_heads)
    ]


def square_tensors(run: Run, length: int = LENGTH) -> list[str]:
    """Nodes with a value as large as the scores."""
    return [
        node.name
        for module in bodies.graph_modules(run.graph)
        for node in module.graph.nodes
        if isinstance(value := node.meta.get("example_value"), Tensor) and tuple(value.shape)[-2:] == (length, length)
    ]


def attention(make_mask: Any) -> Any:
    """A function of query, key, value and the arguments of ``make_mask``."""

    def call(query: Tensor, key: Tensor, value: Tensor, *args: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=make_mask(*args))

    return call


def assert_close(fn: Any, run: Run, tensors: list[Tensor], *args: Any) -> None:
    expected = result_and_gradients(lambda *t: fn(*t, *args), tensors)
    actual = result_and_gradients(lambda *t: run.call(*t, *args), tensors)
    assert len(expected) == len(actual) == 1 + len(tensors)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def run_as(fn: Any, tensors: list[Tensor], args: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    tensors = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    found = fn(*tensors, *(arg.clone() for arg in args))
    outputs = list(found) if isinstance(found, tuple) else [found]
    generator = torch.Generator().manual_seed(1)
    with_gradients = [out for out in outputs if out.requires_grad]
    if with_gradients:
        sum(
            (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() for out in with_gradients
        ).backward()
    return outputs, [tensor.grad for tensor in tensors]


def assert_as_eager(
    fn: Any,
    expected: dict[str, int] | Unknown | str,
    args: Any = (),
    tensors: list[Tensor] | None = None,
    **options: Any,
) -> None:
    """``expected``: what the pass counts, or a pattern of the reason why it left the attention alone."""
    tensors = tensors or inputs()
    # The CPU's fused kernel has wrong gradients for queries whose keys are all hidden by finite numbers.
    with sdpa_kernel(SDPBackend.MATH):
        outputs, gradients = run_as(fn, tensors, args)
    run = specialized(fn, **options)
    found_outputs, found_gradients = run_as(run.call, tensors, args)
    for got, want in zip((*found_outputs, *found_gradients), (*outputs, *gradients), strict=True):
        assert (got is None) == (want is None)
        if isinstance(got, Tensor) and isinstance(want, Tensor):
            assert (got.requires_grad, _steps(got)) == (want.requires_grad, _steps(want))
            if not want.requires_grad:  # a gradient: what is made of NaN may be anything
                got = torch.where(want.isnan(), want, got)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, equal_nan=True)
    if isinstance(expected, dict):
        assert counts(run) == expected
    elif isinstance(expected, Unknown):
        assert counts(run) == {"listed": 1}
        assert_unknown(fn, expected, args, tensors)
    else:
        assert counts(run) == {}
        assert any(re.search(expected, reason) for reason in run.skip_reasons), run.skip_reasons


def _steps(tensor: Tensor) -> list[int]:
    """Strides of dimensions in which they matter."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def assert_unknown(fn: Any, expected: Unknown, args: Any, tensors: list[Tensor]) -> None:
    """Where no kernel reads masks, the attention stays, and the reason says both."""
    torch._dynamo.reset()
    run = specialized(fn, compiler="inductor")
    run_as(run.call, tensors, args)
    assert counts(run) == {}
    assert not run.report.passes[0].changed
    (skip,) = (skip for skip in run.report.passes[0].skips if "returns this mask" not in skip.reason)
    assert re.search(expected.reason, skip.reason), skip.reason
    assert "no block lists are made of it" in skip.reason
    assert skip.source
