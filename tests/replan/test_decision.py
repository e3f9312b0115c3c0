"""What is decided from what a device showed: plain data."""

from __future__ import annotations

import dataclasses

import pytest

from glue_compiler.options import Correction
from glue_compiler.replan.correction import GUESSED_CALLS, guess
from glue_compiler.replan.decision import (
    Asked,
    Predicted,
    StepFacts,
    correction_for,
    error_of,
)
from glue_compiler.replan.device_steps import DeviceSteps, Held

GIB = 2**30
PLAN = Predicted(peak=10 * GIB, kept=6 * GIB, is_fastest=False, is_smallest=False)
ASKED = Asked(budget=12 * GIB, inputs=2 * GIB, predicted=PLAN)


def facts(peak, before=2 * GIB, **how):
    given = {"base": before, "calls": 1, "before": before, "kept": 0, "peak": peak, "is_exact": True}
    return StepFacts(**{**given, **how})


@pytest.mark.parametrize(("share", "misses"), [(1.0, False), (1.02, False), (1.04, True)])
def test_three_percent_of_the_budget_are_tolerated(share, misses):
    step = facts(int(share * ASKED.budget))
    found = correction_for(step, ASKED, error_of(step, ASKED))
    assert (found is not None) == misses
    if found is not None:
        assert found.calls == 1
        assert found.taken == step.peak - PLAN.peak  # nothing else is there: all is the prediction's error
        assert found.is_measured


def test_what_else_is_there_is_taken_off_and_is_no_error():
    step = facts(13 * GIB, before=5 * GIB)  # 3 GiB beside the inputs, and the 10 that are predicted
    assert error_of(step, ASKED) == 0
    assert correction_for(step, ASKED, 0).taken == 3 * GIB


def test_a_peak_that_did_not_grow_is_at_most_that():
    step = facts(100 * GIB, is_exact=False)
    assert error_of(step, ASKED) == 0
    assert correction_for(step, ASKED, 0) is None
    # What was seen wrong in an earlier step is wrong here, too.
    assert correction_for(step, ASKED, 3 * GIB).taken == 3 * GIB
    # And what lies there counts without a peak.
    assert correction_for(dataclasses.replace(step, before=6 * GIB), ASKED, 0).taken == 4 * GIB


def test_a_plan_that_came_from_a_cache_is_judged_by_its_peak_alone():
    asked = dataclasses.replace(ASKED, predicted=None)
    assert correction_for(facts(11 * GIB), asked, 0) is None
    assert correction_for(facts(14 * GIB), asked, 0).taken == 2 * GIB
    assert correction_for(facts(100 * GIB, is_exact=False), asked, 0) is None


def test_the_smallest_plan_is_not_made_again():
    smallest = dataclasses.replace(ASKED, predicted=dataclasses.replace(PLAN, is_smallest=True))
    assert correction_for(facts(20 * GIB), smallest, 0) is None
    # Of several calls another one may keep less.
    assert correction_for(facts(20 * GIB, calls=2), smallest, 0) is not None


def test_auto_leaves_out_what_is_there_when_it_is_asked_again():
    asked = dataclasses.replace(ASKED, is_auto=True, besides=GIB)
    assert correction_for(facts(13 * GIB, before=3 * GIB), asked, 0) is None  # as it was when it was compiled
    assert correction_for(facts(16 * GIB, before=6 * GIB), asked, 0).taken == 0  # an optimiser's state
    kept_by_others = facts(16 * GIB, before=6 * GIB, base=3 * GIB)
    assert correction_for(kept_by_others, asked, 0).taken == 3 * GIB


WAITING = Predicted(peak=3 * GIB, kept=GIB // 8, is_fastest=False, is_smallest=False)
EIGHT = facts(8 * GIB, base=3 * GIB, before=7 * GIB, calls=8, kept=7 * GIB // 8)
TAKEN = 7 * GIB - 7 * GIB // 8 - 2 * GIB


def guessed(calls, taken=TAKEN, **plan):
    predicted = dataclasses.replace(WAITING, **plan)
    return dataclasses.replace(ASKED, guess=Correction(calls, taken), predicted=predicted)


def test_a_guess_is_replaced_by_what_was_seen():
    found = correction_for(EIGHT, guessed(GUESSED_CALLS), 0)
    assert (found.calls, found.taken) == (8, TAKEN)
    assert correction_for(EIGHT, guessed(GUESSED_CALLS, is_fastest=True), 0) is None


@pytest.mark.parametrize(
    ("calls", "taken", "stays"),
    [
        (8, TAKEN, True),
        (7, TAKEN, True),
        (9, TAKEN, False),  # fewer calls
        (8, TAKEN + GIB // 4, True),  # 2% of the budget less beside them
        (8, TAKEN + GIB // 2, False),  # 4%
    ],
)
def test_a_guess_stays_where_there_is_no_more_room_than_that(calls, taken, stays):
    asked = guessed(calls, taken)
    assert (correction_for(EIGHT, asked, 0) is None) == stays
    assert correction_for(dataclasses.replace(EIGHT, peak=13 * GIB), asked, 0).calls == 8


@pytest.mark.parametrize(
    ("allocated", "parameters", "calls"),
    [
        (100, 10, GUESSED_CALLS),
        (200, 100, GUESSED_CALLS),
        (199, 100, 1),
        (102, 100, 1),
        (100, 100, 1),
        (100, 0, GUESSED_CALLS),
        (99, 100, GUESSED_CALLS),  # of an allocator that does not count
    ],
)
def test_who_has_most_of_what_is_on_the_device_is_alone(allocated, parameters, calls):
    found = guess(1280, allocated, parameters + 2, parameters, is_auto=False)
    assert (found.calls, found.is_measured) == (calls, False)
    if calls > 1:
        assert found.taken == 0
        return
    others = max(0, allocated - parameters - 2)
    assert others <= found.taken < others + 10
    assert found.taken % 10 == 0
    assert guess(1280, allocated, parameters + 2, parameters, is_auto=True).taken == 0


class Marks:
    def __init__(self):
        self.held = Held(0, 0)

    def __call__(self):
        return self.held


def test_a_step_counts_the_calls_that_hold_and_what_is_there_then():
    marks = Marks()
    steps = DeviceSteps(marks)
    marks.held = Held(10, 10)
    steps.start(compiles=1)
    first = steps.called("a", inputs=1, kept=4)
    marks.held = Held(16, 16)
    dropped = steps.called("a", inputs=1, kept=4, holds=False)
    second = steps.called("b", inputs=2, kept=5)
    marks.held = Held(30, 40)
    for number in (second, dropped, first, first):
        assert not steps.is_quiet or number == first
        steps.ended(number, has_run=True)
    done = steps.done(compiles=1)
    assert done.facts == StepFacts(base=10, calls=2, before=16, kept=4, peak=40, is_exact=True)
    assert done.inputs == {"a": 1, "b": 2}
    assert done.is_whole
    assert steps.done(compiles=1) is None


def test_a_step_with_a_compile_is_none_to_judge_by():
    steps = DeviceSteps(Marks())
    steps.start(compiles=1)
    steps.ended(steps.called("a", 0, 0), has_run=True)
    assert not steps.done(compiles=2).is_whole


def test_forwards_alone_are_no_step():
    steps = DeviceSteps(Marks())
    steps.start(compiles=0)
    steps.ended(steps.called("a", 0, 0), has_run=False)
    assert steps.done(compiles=0) is None
    assert steps.called("a", 0, 0) is None  # none has begun
