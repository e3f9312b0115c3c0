"""How many layers keep: from what steps take, whatever lengths, rounds and failures there are."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.memory import layer_plan
from glue_compiler.memory.layer_plan import SHARE, Call, LayerPlan
from glue_compiler.memory.layer_roles import Choice, Role, roles_of
from glue_compiler.ops.device_memory import DeviceMemory, memory_of
from glue_compiler.ops.host_link import link_rate

LAYERS = list(range(10, 18))
AGAIN, KEPT = 1, 5
"""Bytes of a call for each unit of its input."""
FORWARD = 0.5
"""Seconds of a call for each unit."""
BASE, TAIL = 1000, 20
"""What is always there, and what head and loss take, for each unit."""


class Device:
    """Steps of a model whose memory is counted by hand.

    ``inputs``: may they move? Each is what a call holds that computes again. ``holds_inputs``: somebody else does, too.
    """

    def __init__(self, budget, layers=tuple(LAYERS), rate=1e-9, inputs=False):
        self.now, self.rate, self.moved, self.slowness = 0.0, rate, [], 1
        self.inputs, self.holds_inputs, self.inputs_moved, self.most_of_step = inputs, False, [], 0
        self.held, self.most, self.budget = BASE, BASE, budget
        self.layers, self.told, self.forgotten = list(layers), [], 0
        self.plan = LayerPlan(budget, self)
        self.plan.told.append(self.told.append)

    def allocated(self):
        return self.held

    def peak(self):
        return self.most

    def forget_peak(self):
        self.most, self.forgotten = self.held, self.forgotten + 1

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
        self.most, self.most_of_step = max(self.most, self.held), max(self.most_of_step, self.held)

    def forward(self, units):
        """Of the layers: which keep; and what backward is to start from."""
        x, kept, leaving = torch.ones(1, requires_grad=True), [], []
        for layer in self.layers:
            call = Call(layer, "kind", units, AGAIN * units * self.inputs)
            role = self.plan.role(call)
            while role.leaves is not None and leaving and leaving[0][0] <= role.leaves:
                self.held -= leaving.pop(0)[1]
            choice = role.choice
            before = self.plan.before_call(call, role)
            x = x * 1.0
            keeps = choice is Choice.KEEP
            self.take((KEPT if keeps else AGAIN) * units)
            self.now += units * FORWARD * self.slowness
            self.plan.called(call, role, before, [x])
            kept += [layer] if keeps else []
            moves = choice is Choice.MOVE
            self.moved += [layer] if moves else []
            self.inputs_moved += [layer] if role.moves_input else []
            self.take((KEPT - AGAIN) * units * (moves and self.inputs))
            freed = AGAIN * (role.moves_input and not self.holds_inputs) + (KEPT - AGAIN) * (moves and self.inputs)
            leaving += [(layer, freed * units)] if moves or role.moves_input else []
        return kept, x

    def step(self, units, rounds=1, backward=True):
        base, self.moved, self.inputs_moved, self.most_of_step = self.held, [], [], self.held
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


def test_inputs_leave_where_a_layer_keeps_by_that():
    """A copy of one takes half a forward, and of values two. Stays so, however often it is decided."""
    device = Device(budget_for(100, 0.5), rate=AGAIN / FORWARD * 2, inputs=True)
    device.learn(100)
    told = len(device.told)
    for _ in range(5):
        assert device.step(100) == [LAYERS[7]]
        assert device.moved == [LAYERS[0], LAYERS[3]]
        assert device.inputs_moved == [LAYERS[at] for at in (1, 2, 4, 5)]
        assert device.most_of_step == needed(100, 1) - 4 * 100 * AGAIN
        device.most = device.held
    assert len(device.told) == told + 1
    assert device.told[-1].endswith(" for a step, 2 on the host, 4 layers' inputs on the host")


@pytest.mark.parametrize("keep", [0.5, 0.9, 1.5, 2.2, 3.4, 7.9])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("copy", [0.1, 0.4, 1.2, 3])
def test_no_step_with_inputs_on_the_host_takes_more_than_the_budget(keep, resets, copy):
    device = Device(budget_for(100, keep), rate=(KEPT - AGAIN) / FORWARD / copy, inputs=True)
    device.learn(100)
    kept, roles = device.step(100), device.plan._roles
    assert len(kept) + len(device.moved) >= int(keep)
    for _ in range(6):
        if resets:
            device.most = device.held
        assert device.step(100) == kept
        assert device.plan._roles == roles
        assert device.most_of_step <= device.budget


@pytest.mark.parametrize("resets", [False, True])
def test_inputs_that_somebody_else_holds_stay(resets):
    """A list of all hidden states, for example: one step shows it."""
    device = Device(budget_for(100, 1.5), rate=AGAIN / FORWARD * 2, inputs=True)
    device.holds_inputs = True
    device.learn(100)
    assert device.step(100) == LAYERS[6:]
    assert device.most_of_step > device.budget
    for _ in range(5):
        if resets:
            device.most = device.held
        device.step(100)
        assert device.inputs_moved == []
        assert device.most_of_step <= device.budget


def test_inputs_leave_where_a_step_takes_a_little_more_for_another_reason():
    device = Device(budget_for(100, 1.02), rate=AGAIN / FORWARD * 2, inputs=True)
    device.learn(100)
    assert device.step(100) == LAYERS[6:]
    device.take(180)  # of others, and stays
    for _ in range(3):
        device.step(100)
        assert device.inputs_moved
        assert device.most_of_step <= device.budget


def test_no_input_moves_where_two_forwards_wait_for_a_backward():
    device = Device(budget_for(100, 0.5, rounds=2), rate=AGAIN / FORWARD * 2, inputs=True)
    device.learn(100, rounds=2)
    for _ in range(3):
        assert device.step(100, rounds=2) == []
        assert device.inputs_moved == []


def test_roles_are_decided_once_for_what_stays_the_same(monkeypatch):
    device, asked = Device(budget_for(100, 3), inputs=True), []
    monkeypatch.setattr(layer_plan, "roles_of", lambda *args: (asked.append(args), roles_of(*args))[1])
    device.learn(100)
    for _ in range(5):
        device.step(100)
    assert len(asked) == 1


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
    for _ in range(3):
        assert device.step(100) == LAYERS[-2:]
        assert device.most <= device.budget


@pytest.mark.parametrize("earlier", [0, 500, 10**5])
def test_what_comes_and_goes_is_planned_for_before_it_shows_in_a_peak(earlier):
    """Gradients that accumulate over two of three batches, beside a peak of an earlier time that hides this one's."""
    device = Device(budget_for(100, 4))
    device.most += earlier
    device.learn(100)
    for number in range(30):
        device.held = BASE + 800 * (number % 3 > 0)
        kept = device.step(100)
        assert device.most_of_step <= device.budget
    assert kept == LAYERS[-2:]
    assert device.forgotten <= (earlier > device.budget)


def test_a_peak_of_loading_weights_is_forgotten_once():
    device = Device(budget_for(100, 4))
    device.most = 10 * device.budget
    device.learn(100)
    assert device.step(100) == []
    for _ in range(3):
        assert device.step(100) == LAYERS[-4:]
    assert device.forgotten == 1


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
    call = Call(LAYERS[0], "kind", 100)
    assert device.plan.before_call(call, Role()).allocated is not None
    device.step(100)
    assert device.plan.before_call(call, Role()) is None  # one of its kind was timed in this step
    device.plan._clocked.clear()
    assert device.plan.before_call(call, Role(leaves=3)) is None  # it waits for a copy
    assert device.plan.before_call(call, Role()).allocated is None


def test_layers_are_timed_again_when_others_have_used_the_device():
    """As while several processes compile: forwards seem long, and more copies to fit beside them than do."""
    alone = Device(budget_for(100, 2), rate=(KEPT - AGAIN) / FORWARD / 3)
    alone.learn(100)
    alone.step(100)
    shared = Device(budget_for(100, 2), rate=(KEPT - AGAIN) / FORWARD / 3)
    shared.slowness = 3
    shared.learn(100)
    shared.step(100)
    assert len(shared.moved) > len(alone.moved) > 0
    shared.slowness = 1
    for _ in range(2):
        shared.step(100)
    assert shared.moved == alone.moved
    told = len(shared.told)
    shared.slowness = 0.97
    for _ in range(3):
        shared.step(100)
    assert len(shared.told) == told


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


GIB = 2**30


@pytest.mark.parametrize(
    ("budget", "free", "limit"),
    [
        (24 * GIB, 60, 24 * GIB),
        (0.5, 60, 40 * GIB),
        ("auto", 60, 59 * GIB),  # with 2 unused and 1 of tensors, less 4 of margin
        ("auto", 0, 0),
    ],
)
def test_what_a_budget_comes_to_on_a_card(monkeypatch, budget, free, limit):
    monkeypatch.setattr(layer_plan, "memory_of", lambda _: DeviceMemory(80 * GIB, free * GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: GIB)
    assert layer_plan.CudaMemory(torch.device("cuda", 0)).limit(budget) == limit


@pytest.mark.gpu
def test_a_card_says_what_it_has():
    device = torch.device("cuda", 0)
    found = memory_of(device)
    assert 0 < found.free <= found.total
    assert 0 <= found.unused <= found.total
    assert 1e8 < link_rate(device) < 1e12
