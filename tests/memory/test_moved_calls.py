"""Calls whose values and inputs lie on the host until backward: in any order, with the gradients of none that move."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from glue_compiler.memory.layer_roles import Choice, Role
from glue_compiler.memory.moved_calls import Mover
from glue_compiler.ops.copy_engine import CopyEngine


def copies_of(mover, monkeypatch):
    """What is copied from here on: the name of the engine's method, and the tensor's sizes."""
    events, engine = [], mover._copies
    for name in ("start_offload", "wait_offload", "start_reload", "wait_reload"):
        original = getattr(engine, name)
        monkeypatch.setattr(
            engine,
            name,
            lambda tensor, *rest, n=name, f=original: (events.append((n, tensor.shape)), f(tensor, *rest))[1],
        )
    return events


class Saves(torch.autograd.Function):
    """Of its inputs, as a layer that computes again."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x**3 * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return 3 * x**2 * y * grad, x**3 * grad


def chain(mover, roles, change=lambda own: None):
    """The sum of what layers make that share an input beside their own, and what was given to the first of them."""
    start = torch.linspace(0.5, 1, 8, dtype=torch.double, requires_grad=True)
    x, shared = start * 2.0, start * 1.5
    for layer, role in roles:
        own = x
        (x,) = mover.run(lambda *inputs: (Saves.apply(*inputs),), (own, shared), layer, role, own)
        change(own)
    return x.sum(), start


AGAIN = Role(moves_input=True)


@pytest.mark.parametrize(
    "roles",
    [
        [(0, AGAIN), (1, AGAIN), (2, Role(leaves=1, returns=(1,))), (3, Role())],
        [(0, AGAIN), (0, replace(AGAIN, returns=(0,))), (0, Role(leaves=0, returns=(0,)))],  # one layer, three times
        [(0, AGAIN), (1, Role(returns=(0, 7), leaves=7))],  # 7 is left out
        [(0, AGAIN), (1, Role(Choice.MOVE, returns=(0,), moves_input=True)), (2, Role(leaves=1, returns=(1,)))],
        [(0, AGAIN), (1, AGAIN)],  # nothing waits for the copies
    ],
)
def test_only_a_layers_own_input_moves_whatever_calls_there_are(roles, monkeypatch):
    mover = Mover(CopyEngine(), least=1)
    events = copies_of(mover, monkeypatch)
    found = [torch.autograd.grad(*chain(mover, roles)) for _ in range(2)]
    expected = torch.autograd.grad(*chain(mover, [(layer, Role()) for layer, _ in roles]))
    assert [name for name, _ in events].count("start_offload") == 2 * sum(role.moves_input for _, role in roles)
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-14, atol=0)


def test_which_inputs_can_move():
    mover, weight = Mover(CopyEngine(), least=64), torch.ones(8, 8, requires_grad=True)
    made = weight * 2.0
    assert mover.bytes_of(made) == 256
    assert mover.bytes_of(made.transpose(0, 1)) == 256
    stay = [weight, made.detach(), made[:, 1:], made[:1].expand(8, 8), made[0, :4], nn.Parameter(weight.detach())]
    assert [mover.bytes_of(each) for each in stay] == [0] * len(stay)


def test_an_input_comes_back_in_front_of_values_that_return_in_the_same_layer(monkeypatch):
    mover = Mover(CopyEngine(), least=1)
    events = copies_of(mover, monkeypatch)
    x = torch.ones(4, dtype=torch.double, requires_grad=True) * 0.1
    (x,) = mover.run(lambda x: (x.exp()[:2] * 2.0,), (x,), 0, Role(Choice.MOVE))
    (x,) = mover.run(lambda x: (x.square().repeat(3),), (x,), 1, AGAIN, x)
    (x,) = mover.run(lambda x: (x * 2.0,), (x,), 2, Role(leaves=1, returns=(1, 0)))
    events.clear()
    x.sum().backward()
    assert events[:2] == [("start_reload", (2,)), ("start_reload", (4,))]


def test_a_write_to_an_input_before_it_has_left_is_an_error():
    """And one behind that is none, as backward reads the copy."""
    mover, inputs = Mover(CopyEngine(), least=1), []

    def write(own, at):
        inputs.append(own.detach())
        if len(inputs) == at + 1:
            inputs[0].mul_(2.0)

    roles = [(0, AGAIN), (1, Role()), (2, Role(leaves=0, returns=(0,))), (3, Role())]
    expected = torch.autograd.grad(*chain(mover, roles))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(*chain(mover, roles, partial(write, at=0)))
    inputs.clear()
    torch.testing.assert_close(torch.autograd.grad(*chain(mover, roles, partial(write, at=3))), expected)


def test_a_call_that_fails_leaves_the_next_step_right():
    mover, roles = Mover(CopyEngine(), least=1), [(0, AGAIN), (1, AGAIN), (2, Role(leaves=1, returns=(1,)))]
    expected = torch.autograd.grad(*chain(mover, roles))

    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    for layer, role in roles[:2]:
        x = torch.ones(8, requires_grad=True) * 2.0
        with pytest.raises(torch.OutOfMemoryError):
            mover.run(fails, (x,), layer, role, x)
    torch.testing.assert_close(torch.autograd.grad(*chain(mover, roles)), expected)
