"""Runs functions with losses compiled and eagerly, and compares all that a caller can see."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from glue_compiler.ops import loss_chunks
from tests.captured import Run, compile_with_glue

CLASSES = 23
ONLY = {"chunk_loss": True, "hoist_metadata": False}


def largest_allocation(call: Callable[[], Any]) -> int:
    """Bytes of the largest piece of memory that ``call`` takes."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        call()
    return max(e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]")


def rows_and_head(
    rows: Sequence[int] = (3, 8), size: int = 4, classes: int = CLASSES, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states ``[*rows, size]``, a weight ``[classes, size]`` and targets ``[*rows]``, a few of them ignored."""
    hidden = torch.randn(*rows, size, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(classes, size, dtype=dtype))  # of static size, as those of models
    target = torch.randint(0, classes, tuple(rows))
    target.view(-1)[::5] = -100
    return hidden, weight, target


def results_of(fn: Callable[..., Any], inputs: Sequence[Any], backward: bool = True) -> list[Any]:
    """Outputs, whether each needs a gradient, and the gradients of the inputs (None where there is none)."""
    given = [copy.deepcopy(value) if _floats(value) else value for value in inputs]
    outputs = fn(*given)
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    ends = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    if ends and backward:
        generator = torch.Generator().manual_seed(3)
        total = sum((end * torch.randn(end.shape, generator=generator, dtype=torch.float64)).sum() for end in ends)
        total.backward()
    needs = [isinstance(out, torch.Tensor) and out.requires_grad for out in outputs]
    values = [out.detach().clone() if isinstance(out, torch.Tensor) else out for out in outputs]
    return [*values, *needs, *(value.grad if _floats(value) else None for value in given)]


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def assert_same(expected: Sequence[Any], actual: Sequence[Any], atol: float = 1e-10) -> None:
    assert len(expected) == len(actual)
    for place, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if not isinstance(want, torch.Tensor):
            assert (want, type(want)) == (got, type(got)), f"result {place}"
            continue
        assert got is not None, f"result {place} is None"
        torch.testing.assert_close(got, want, atol=atol, rtol=atol, equal_nan=True, msg=lambda m, p=place: f"{p}: {m}")


def check(fn: Callable[..., Any], inputs: Sequence[Any], atol: float = 1e-10, **how: Any) -> Run:
    """``fn`` compiled gives what it gives eagerly: outputs, gradients, and where there are none."""
    expected = results_of(fn, inputs)
    compiled = compile_with_glue(fn, passes=ONLY, **how)
    assert_same(expected, results_of(compiled.call, inputs), atol)
    return compiled


def check_rewritten(fn: Callable[..., Any], inputs: Sequence[Any], atol: float = 1e-10, **how: Any) -> dict[str, int]:
    """:func:`check`, and the logits are gone; returns what the pass counted."""
    compiled = check(fn, inputs, atol, **how)
    counts = {name: count for name, count in compiled.counts.items() if count and name != "nodes_erased"}
    assert counts, f"left alone: {compiled.skip_reasons}"
    if not how.get("dynamic"):
        assert_no_logits(compiled, inputs)
    return counts


def assert_no_logits(compiled: Run, inputs: Sequence[Any]) -> None:
    """Nothing with a number of each class in half of the rows is made, forward or backward."""
    hidden = inputs[0]
    rows = hidden.numel() // hidden.shape[-1]
    largest = largest_allocation(lambda: results_of(compiled.call, inputs))
    assert rows < 16 or largest < rows * CLASSES * hidden.element_size() / 2, f"{largest} bytes"


def check_left_alone(fn: Callable[..., Any], inputs: Sequence[Any], reason: str, **how: Any) -> None:
    """``fn`` is right, and the pass left it alone, because of ``reason``."""
    compiled = check(fn, inputs, **how)
    assert not compiled.report.passes[0].changed, compiled.counts
    assert any(reason in given for given in compiled.skip_reasons), compiled.skip_reasons


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four rows."""
    limits = loss_chunks.ChunkLimits(target_bytes=1, least_rows=4, multiple=4)
    monkeypatch.setitem(loss_chunks.LIMITS, "cpu", limits)
