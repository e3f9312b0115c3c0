"""What is drawn of a plan is what was planned."""

from __future__ import annotations

import json

import pytest

from glue_compiler.passes.plan_memory.drawing import POINTS, drawing_of
from glue_compiler.passes.plan_memory.plan import plan_memory
from glue_compiler.passes.plan_memory.predict import Predictor
from tests.passes.plan_memory.steps import MIB, RATES, chain


def drawn(step, budget, movable=frozenset()):
    plan = plan_memory(step, RATES, budget, movable)
    return plan, drawing_of(plan, step, Predictor(step, plan.segments, RATES), budget)


@pytest.mark.parametrize("budget", [2**40, 40 * MIB, 24 * MIB, 1])
@pytest.mark.parametrize("moves", [False, True])
def test_the_highest_place_is_the_predicted_peak(budget, moves):
    step = chain(10, product_seconds=0.1)
    movable = frozenset(place for place, value in enumerate(step.values) if value.nbytes) if moves else frozenset()
    plan, found = drawn(step, budget, movable)
    assert max(found["always"] + sum(one) for one in (*found["forward"], *found["backward"])) == plan.peak
    assert min(min(one) for one in (*found["forward"], *found["backward"])) >= 0
    assert json.loads(json.dumps(found)) == found


def test_segments_say_what_is_kept_and_what_is_computed_again():
    step = chain(10)
    plan, found = drawn(step, 40 * MIB)
    assert sum(one["kept"] + one["moved"] for one in found["segments"]) == sum(
        step.values[p].nbytes for p in plan.saved
    )
    assert sum(one["recomputed"] for one in found["segments"]) == sum(step.values[p].is_kernel for p in plan.recomputed)
    numbers = [one["number"] for one in found["segments"]]
    assert numbers == sorted(set(numbers))
    again = found["kinds"].index("recomputed")
    assert not any(one[again] for one in found["forward"])
    assert any(one[again] for one in found["backward"])


def test_a_long_step_keeps_its_peak_in_few_points():
    plan, found = drawn(chain(200), 2**40)
    assert len(found["forward"]) <= POINTS
    assert max(found["always"] + sum(one) for one in (*found["forward"], *found["backward"])) == plan.peak
