"""Which results are predicted to lie where an operand lay."""

from __future__ import annotations

import pytest

from glue_compiler.passes.plan_memory.choose import Choice
from glue_compiler.passes.plan_memory.predict import Predictor
from glue_compiler.passes.plan_memory.step import TrainingStep, Value
from tests.passes.plan_memory.steps import MIB, RATES


@pytest.mark.parametrize("is_pointwise", [False, True])
def test_nothing_is_written_over_what_stays(is_pointwise):
    """A product that backward needs, and what a fused kernel makes of it for the caller."""
    values = (
        Value((), 0, 0, 0.0, is_input=True),
        Value((0,), 1, 4 * MIB, 1.0, is_kernel=True),
        Value((1,), 2, 4 * MIB, 1.0, is_pointwise=is_pointwise),
        Value((), 3, 0, 0.0, is_input=True, is_backward=True),
        Value((1, 3), 4, 4 * MIB, 1.0, is_pointwise=is_pointwise, is_backward=True),
    )
    step = TrainingStep(values, (0, 1, 2), (2,), (4,), 0, {})
    found = Predictor(step, {1: 0, 2: 0}, RATES).predict(Choice(frozenset({1}), frozenset()))
    assert found.peak == 8 * MIB


@pytest.mark.parametrize(("read", "widths"), [((1, 2), 2), ((1,), 3)], ids=["computed from it", "beside it"])
def test_nothing_is_written_over_what_another_value_of_the_same_kernel_reads(read, widths):
    """Of a product two values for two products, the second one perhaps of the first."""
    values = (
        Value((), 0, 0, 0.0, is_input=True),
        Value((0,), 1, MIB, 1.0, is_kernel=True),
        Value((1,), 2, MIB, 1.0, is_pointwise=True),
        Value(read, 3, MIB, 1.0, is_pointwise=True),
        Value((2,), 4, 0, 1.0, is_kernel=True),
        Value((3,), 5, 0, 1.0, is_kernel=True),
        Value((4, 5), 6, 8, 1.0),
        Value((), 7, 0, 0.0, is_input=True, is_backward=True),
        Value((6, 7), 8, 0, 0.0, is_backward=True),
    )
    step = TrainingStep(values, tuple(range(7)), (6,), (8,), 0, {})
    predictor = Predictor(step, dict.fromkeys(range(1, 7), 0), RATES)
    assert predictor.predict(Choice(frozenset({6}), frozenset())).peak == widths * MIB


def test_nothing_is_written_over_what_the_same_kernel_writes():
    """Two products that are saved, a value of the first one, which a kernel reads, and behind that one of both."""
    values = (
        Value((), 0, 0, 0.0, is_input=True),
        Value((0,), 1, MIB, 1.0, is_kernel=True),
        Value((1,), 2, MIB, 1.0, is_pointwise=True),
        Value((2,), 3, 0, 1.0, is_kernel=True),
        Value((0,), 4, MIB, 1.0, is_kernel=True),
        Value((1, 4), 5, MIB, 1.0, is_pointwise=True),
        Value((3, 5), 6, 0, 1.0, is_kernel=True),
        Value((), 7, 0, 0.0, is_input=True, is_backward=True),
        Value((1, 4, 7), 8, 0, 0.0, is_backward=True),
    )
    step = TrainingStep(values, tuple(range(7)), (6,), (8,), 0, {})
    predictor = Predictor(step, dict.fromkeys(range(1, 7), 0), RATES)
    assert predictor.predict(Choice(frozenset({1, 4}), frozenset())).peak == 4 * MIB
