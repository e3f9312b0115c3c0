"""What a profile of steps says of their kernels."""

from __future__ import annotations

import pytest

from benchmarks.step_kernels import lines_of, step_kernels

PRODUCT, SUM = "void at::native::(anonymous namespace)::product<float>(int, float*)", "triton_sum_3"


def test_kernels_of_a_step_are_means_over_the_steps_longest_first():
    spans = [(SUM, 0, 100), (PRODUCT, 100, 500), (PRODUCT, 600, 900), (SUM, 850, 1000)]
    step = step_kernels(spans, 2)
    assert [(each.name, each.calls, each.ms) for each in step.kernels] == [
        ("at::native::product<float>", 1, 0.35),
        ("triton_sum_3", 1, 0.125),
    ]
    assert (step.busy_ms, step.step_ms) == (0.45, 0.5)


def test_order_does_not_matter_and_what_runs_at_once_is_busy_once():
    step = step_kernels([("b", 200, 300), ("a", 0, 1000), ("c", 900, 1500)], 1)
    assert (step.busy_ms, step.step_ms) == (1.5, 1.5)


def test_the_others_are_one_line():
    lines = list(lines_of(step_kernels([("a", 0, 3000), ("b", 3000, 4000), ("c", 4000, 5000)], 1), 1))
    assert lines[0] == "busy 5.00 ms of 5.00, 3 kernels"
    assert lines[2:] == ["| 3.000 | 1 | `a` |", "| 2.000 | 2 | others |"]


def test_nothing_is_an_error():
    with pytest.raises(ValueError, match="nothing ran"):
        step_kernels([], 1)
