"""Layers that are compiled one by one: the first steps take little, and then each is planned with their number in
view."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from glue_compiler import GlueWarning
from tests.passes.overlap_offload.models import Block, equal
from tests.replan.steps import Device, Followed, results

LAYERS = 6
WIDTH, ROWS = 16, 256
X = ROWS * WIDTH * 4
WEIGHTS = 100_000
PARAMETERS = sum(parameter.nbytes for parameter in Block(WIDTH).parameters())


class Layers(nn.Module):
    """Each layer's call leaves on ``device`` what its plan keeps and its result, until its backward."""

    def __init__(self, device, run, checkpointed=False, frozen=False, leaf=False):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.device, self.run, self.checkpointed, self.leaf = device, run, checkpointed, leaf

    def kept(self):
        plan = self.run.plans[-1] if self.run.plans else {"saved_bytes": 0, "moved_bytes": 0}
        return plan["saved_bytes"] - plan["moved_bytes"]

    def forward(self, x):
        x = self.embed(x)
        if self.leaf:
            x = x.detach().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            grown = X + (0 if self.checkpointed else self.kept())
            self.device.allocated += grown
            if x.requires_grad:
                x.register_hook(lambda _, grown=grown: self.shrink(grown))
        return x

    def shrink(self, grown):
        """When a layer's backward begins: what it needs meanwhile comes on top of all that waits."""
        if self.run.plans:
            self.device.peak = max(self.device.peak, self.device.allocated + self.run.plans[-1]["peak"] - self.kept())
        self.device.allocated -= grown


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def one_by_one(budget, **how):
    """A model whose layers are compiled, its input and what eager makes of it."""
    device = Device(WEIGHTS)
    run = Followed(device, memory_budget=budget)
    model, x = Layers(device, run, **how), torch.randn(ROWS, WIDTH)
    expected = results(model, model, x)
    for layer in model.layers:
        layer.compile(**run.how)
    return device, run, model, x, expected


def trained(budget, steps=5, **how):
    """The model after some steps, whose results are those of eager."""
    device, run, model, x, expected = one_by_one(budget, **how)
    assert device.allocated == WEIGHTS
    peaks = []
    for _ in range(steps):
        device.peak = 0
        assert equal(results(model, model, x), expected)
        peaks.append(device.peak)
    return run, peaks


@pytest.mark.parametrize(("budget", "leaf"), [(600_000, False), (700_000, False), (700_000, True)])
def test_each_layer_is_planned_with_their_number_in_view(budget, leaf):
    run, peaks = trained(budget, leaf=leaf)
    first, second = run.plans
    assert f"{LAYERS} calls of planned graphs" in run.told[-1]
    assert first["saved_bytes"] < second["saved_bytes"]
    assert second["microseconds"] < first["microseconds"]
    # In the first step no more than in the last, which fits.
    assert peaks[0] <= peaks[-1] <= 1.03 * budget
    assert (second["microseconds"] == second["least_microseconds"]) == (budget == 700_000)


def test_a_whole_model_behind_a_graph_break_is_planned_once():
    """As behind an embedding with a hook that lets its output need a gradient."""
    device = Device(2 * LAYERS * PARAMETERS - 1)
    run = Followed(device, memory_budget=300_000)
    model, x = nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS))), torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = results(model, model, x)
    call = torch.compile(model, **run.how)
    for _ in range(4):
        device.peak = 0
        assert equal(results(call, model, x, device, 305_000), expected)  # less than 3% above
    (plan,) = run.plans
    assert plan["microseconds"] > plan["least_microseconds"]
    assert plan["peak"] <= 300_000 - LAYERS * PARAMETERS + 1
    assert not run.told


def test_a_plan_of_the_least_memory_is_what_little_room_asks_for():
    with (
        pytest.warns(match="a peak of .* is predicted"),
        pytest.warns(match="calls that wait for their backward hold"),
    ):
        run, _ = trained(250_000)
    first, second = run.plans
    assert second["saved_bytes"] == first["saved_bytes"]


def test_what_fits_for_very_many_is_not_planned_again():
    run, _ = trained(2**40)
    (plan,) = run.plans
    assert plan["microseconds"] == plan["least_microseconds"]
    assert not run.told


def test_a_step_in_whose_middle_layers_are_followed_again_decides_nothing():
    """Nor the last one that was seen: the sixth step's last layer is the first call that counts again."""
    device, run, model, x, expected = one_by_one(20_000_000)
    for step in range(9):
        device.peak = 0
        device.allocated = WEIGHTS if step < 5 else 20_500_000
        with warnings.catch_warnings(category=GlueWarning, action="ignore"):
            assert equal(results(model, model, x), expected)
        assert len(run.told) == (step == 8)
    assert f"{LAYERS} calls of planned graphs" in run.told[0]


def test_a_checkpoint_around_each_layer_holds_one_at_a_time():
    run, peaks = trained(500_000, checkpointed=True)
    (plan,) = run.plans
    assert plan["microseconds"] == plan["least_microseconds"]
    assert peaks[-1] > plan["peak"]
    assert not run.told


def test_a_checkpoint_that_begins_later_keeps_the_plan_too():
    _, run, model, x, expected = one_by_one(700_000)
    for checkpointed in (False, True, True, False, True):
        model.checkpointed = checkpointed
        assert equal(results(model, model, x), expected)
    assert len(run.plans) == 1


def test_layers_beside_checkpointed_ones_share_what_those_leave():
    class Other(Block):
        def forward(self, x):
            return super().forward(x).tanh()

    device = Device(WEIGHTS)
    run = Followed(device, memory_budget=700_000)
    model, x = nn.ModuleList((Block, Other)[index % 2](WIDTH) for index in range(LAYERS)), torch.randn(ROWS, WIDTH)
    x.requires_grad_()

    def call(x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False) if type(layer) is Block else layer(x)
        return x

    expected = results(call, model, x)
    for layer in model:
        layer.compile(**run.how)
    for step in range(4):
        assert equal(results(call, model, x, device, step * 10**4), expected)
    assert [f"{LAYERS // 2} calls of planned graphs" in told for told in run.told] == [True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_several_layers(reentrant):
    device = Device(WEIGHTS)
    run = Followed(device, memory_budget=700_000)
    model, x = nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS))), torch.randn(ROWS, WIDTH, requires_grad=True)

    def halves(x):
        for part in (model[:3], model[3:]):
            x = checkpoint(part, x, use_reentrant=reentrant)
        return x

    expected = results(halves, model, x)
    for layer in model:
        layer.compile(**run.how)
    for step in range(4):
        assert equal(results(halves, model, x, device, step * 10**6), expected)


def test_a_layer_whose_input_needs_no_gradient_begins_with_the_whole_budget():
    """It is the first of its step; the others are in the middle of it."""
    run, _ = trained(900_000, frozen=True, steps=1)
    alone, others = run.plans
    assert alone["microseconds"] == alone["least_microseconds"]
    assert others["saved_bytes"] < alone["saved_bytes"]


def test_layers_of_two_kinds_share_the_budget():
    """The calls of all planned graphs count, whichever graph they are of."""

    class Other(Block):
        def forward(self, x):
            return super().forward(x).tanh()

    device = Device(WEIGHTS)
    run = Followed(device, memory_budget=900_000)
    model, x = Layers(device, run), torch.randn(ROWS, WIDTH)
    model.layers = nn.ModuleList((Block, Other)[index % 2](WIDTH) for index in range(LAYERS))
    expected = results(model, model, x)
    for layer in model.layers:
        layer.compile(**run.how)
    for _ in range(4):
        assert equal(results(model, model, x), expected)
    assert len(run.plans) == 4
    assert [f"{LAYERS} calls of planned graphs" in told for told in run.told] == [True, True]
