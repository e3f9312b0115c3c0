"""How many layers keep: from what steps take, whatever lengths, rounds and failures there are."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.memory.layer_plan import SHARE, LayerPlan
from glue_compiler.memory.layer_roles import Choice

LAYERS = list(range(10, 18))
AGAIN, KEPT = 1, 5
"""Bytes of a call for each unit of its input."""
FORWARD = 0.5
"""Seconds of a call for each unit."""
BASE, TAIL = 1000, 20
"""What is always there, and what head and loss take, for each unit."""


class Device:
    """Steps of a model whose memory is counted by hand."""

    def __init__(self, budget, layers=tuple(LAYERS), rate=1e-9):
        self.now, self.rate, self.moved = 0.0, rate, []
        self.held, self.most, self.budget = BASE, BASE, budget
        self.layers, self.told = list(layers), []
        self.plan = LayerPlan(budget, self)
        self.plan.told.append(self.told.append)

    def allocated(self):
        return self.held

    def peak(self):
        return self.most

    def limit(self, budget):
        return budget

    def clock(self):
        return self.now

    def seconds(self, start, end):
        return end - start

    def link(self):
        return self.rate

    def take(self, nbytes):
        self.held += nbytes
        self.most = max(self.most, self.held)

    def forward(self, units):
        """Of the layers: which keep; and what backward is to start from."""
        x, kept = torch.ones(1, requires_grad=True), []
        for layer in self.layers:
            choice = self.plan.role(layer, "kind", units).choice
            before = self.plan.before_call()
            x = x * 1.0
            keeps = choice is Choice.KEEP
            self.take((KEPT if keeps else AGAIN) * units)
            self.now += units * FORWARD
            self.plan.called(layer, units, choice, before, [x])
            kept += [layer] if keeps else []
            self.moved += [layer] if choice is Choice.MOVE else []
        return kept, x

    def step(self, units, rounds=1, backward=True):
        base, self.moved = self.held, []
        forwards = [self.forward(units) for _ in range(rounds)]
        self.take(TAIL * units)
        for _, x in forwards:
            if backward:
                x.backward()
        self.held = base
        return forwards[-1][0]

    def learn(self, units, rounds=1):
        """The first step compiles, the second one shows what one kept layer takes."""
        self.plan.compiles()
        assert self.step(units, rounds) == []
        assert self.step(units, rounds) == self.layers[-1:]


def needed(units, keep, rounds=1):
    """What a step takes in which so many layers keep."""
    return BASE + TAIL * units + rounds * units * (AGAIN * len(LAYERS) + (KEPT - AGAIN) * keep)


def budget_for(units, keep, rounds=1):
    return int(needed(units, keep, rounds) / SHARE) + 1


@pytest.mark.parametrize("keep", [0, 1, 3, 7, 8])
def test_the_last_layers_keep_as_many_as_fit(keep):
    device = Device(budget_for(100, keep))
    device.learn(100)
    for _ in range(3):
        assert device.step(100) == LAYERS[len(LAYERS) - keep :]
    assert device.most <= max(device.budget, needed(100, 1))


@pytest.mark.parametrize("at", [0, 3, 7])
def test_layers_that_a_step_leaves_out_do_not_count_twice(at):
    """Stochastic depth: no step exceeds the budget, whichever layer is left out."""
    device = Device(budget_for(100, 4))
    device.learn(100)
    for number in range(40):
        device.layers = [layer for i, layer in enumerate(LAYERS) if i != at or number % 3]
        device.step(100)
        assert device.most <= device.budget
    device.layers = list(LAYERS)
    for _ in range(2):
        kept = device.step(100)
    assert kept == LAYERS[4:]


@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize("known", [0, 1, 4])
def test_a_layer_that_takes_anothers_place_is_planned_for(at, known):
    device = Device(budget_for(100, 8))
    device.plan.compiles()
    for _ in range(known):
        device.step(100)
    device.layers[at] = 99
    for _ in range(20):
        kept = device.step(100)
    assert kept == device.layers
    assert list(device.plan._layers) == device.layers
    assert device.plan._timed == [] or len(device.plan._timed) <= len(LAYERS)


def test_layers_keep_on_the_host_as_far_apart_as_copies_take():
    """One copy takes as long as three forwards, by what both were measured to take."""
    device = Device(budget_for(100, 2), rate=(KEPT - AGAIN) / FORWARD / 3)
    device.learn(100)
    for _ in range(3):
        assert device.step(100) == LAYERS[6:]
        assert device.moved == [LAYERS[0], LAYERS[3]]


def test_no_layer_moves_where_two_forwards_wait_for_a_backward():
    device = Device(budget_for(100, 4, rounds=2), rate=1e9)
    device.learn(100, rounds=2)
    assert device.step(100, rounds=2) == LAYERS[4:]
    assert device.moved == []


@pytest.mark.parametrize("when", [1, 2, 3, 5])
def test_statistics_that_a_user_resets_show_no_less(when):
    """Once, or behind each step, as callbacks that log a step's peak do."""
    device = Device(budget_for(100, 3))
    device.plan.compiles()
    for step in range(8):
        kept = device.step(100)
        if step >= 2:
            assert len(kept) == 3
        if step % when == 0:
            device.most = device.held


def test_what_is_decided_is_told():
    device = Device(budget_for(100, 3))
    device.learn(100)
    device.step(100)
    assert device.told[-1].startswith("3 of 8 layers keep what backward needs: 1.17 KiB")


def test_a_step_that_compiles_shows_nothing():
    """Of the tuning of kernels, for example, which takes more than the step."""
    device = Device(budget_for(100, 3))
    device.learn(100)
    device.most += 10**6
    device.plan.compiles()
    assert device.step(100) == LAYERS[-3:]
    assert device.step(100) == LAYERS[-3:]


@pytest.mark.parametrize(("units", "keep"), [(50, 8), (200, 0), (110, 2)])
def test_another_length_is_chosen_for_before_it_runs(units, keep):
    """What grows with the length is known of the first one."""
    device = Device(budget_for(100, 3))
    device.learn(100)
    device.step(100)
    assert device.step(units) == LAYERS[len(LAYERS) - keep :]
    assert device.step(100) == LAYERS[-3:]


def test_rounds_that_wait_together_share_the_budget():
    """Two forwards before a backward, as a loss of two answers has."""
    device = Device(budget_for(100, 4, rounds=2))
    device.learn(100, rounds=2)
    for _ in range(3):
        assert device.step(100, rounds=2) == LAYERS[-4:]
    assert device.most <= device.budget


def test_accumulation_is_one_round_at_a_time():
    device = Device(budget_for(100, 4))
    device.learn(100)
    for _ in range(6):
        assert device.step(100) == LAYERS[-4:]


def test_a_forward_that_is_dropped_is_not_waited_for():
    device = Device(budget_for(100, 4))
    device.learn(100)
    for _ in range(4):
        device.step(100, backward=False)
    assert device.step(100) == LAYERS[-4:]


def test_what_others_take_later_makes_fewer_keep():
    device = Device(budget_for(100, 4))
    device.learn(100)
    device.step(100)
    device.take(800)  # two layers' worth, and stays
    device.step(100)
    assert device.step(100) == LAYERS[-2:]


def test_the_peak_of_an_evaluation_is_not_the_steps():
    device = Device(budget_for(100, 4))
    device.learn(100)
    device.step(100)
    device.most += 1
    assert device.most < device.budget
    for _ in range(3):
        assert device.step(100) == LAYERS[-4:]


def test_what_is_allocated_is_asked_in_the_first_steps_alone():
    device = Device(budget_for(100, 4))
    device.learn(100)
    assert device.plan.before_call() is not None
    device.step(100)
    assert device.plan.before_call() is None


def test_memory_that_runs_out_makes_fewer_keep():
    device = Device(budget_for(100, 4))
    device.learn(100)
    device.step(100)
    device.plan.ran_out()
    after = [device.step(100) for _ in range(3)]
    assert after[-1]
    assert len(after[-1]) < 4


def test_a_round_without_backward_leaves_nothing_behind():
    device = Device(budget_for(100, 4))
    device.learn(100)
    for _ in range(10):
        device.step(100, backward=False)
    assert len(device.plan._waiting) <= 1
