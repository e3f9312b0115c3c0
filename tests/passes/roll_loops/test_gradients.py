"""Which results of a rolled loop need gradients, which operands get some, and what may be written in between."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.ops.loop_gradients import step_gradients
from glue_compiler.passes.roll_loops import body
from tests.passes.roll_loops import loops
from tests.passes.roll_loops.test_loops import compiled, outcome, rolled


def decays(x, a, state):
    """A number that no gradient goes through."""
    rate = state.detach()[0, 0].cos()
    for i in range(x.shape[1]):
        state = state * rate + x[:, i]
        rate = rate * 0.9
    return state, rate


def keeps_the_largest(x, a, state):
    largest = state.detach().amax()
    for i in range(x.shape[1]):
        state = state * 0.5 + x[:, i]
        largest = torch.maximum(largest, state.detach().amax())
    return state, largest


def of_data_alone(x, a, state):
    seen, rows = state.detach(), a.detach()
    for i in range(x.shape[1]):
        state = state * 0.5 + x[:, i]
        seen = seen * 0.9 + rows[:, i]
    return state, seen


def writes_what_needs_no_gradient(x, a, state):
    out, rows = torch.zeros_like(x), a.detach()
    for i in range(x.shape[1]):
        state = state * 0.5 + x[:, i]
        out[:, i] = rows[:, i].sin()
    return state, out


def detaches_its_state(x, a, state):
    state = (state.detach() + x[:, 0]).sin()
    for i in range(x.shape[1]):
        state = (state.detach() * a[:, i] + x[:, i]).sin()
    return (state,)


def reads_a_weight_detached(x, a, state):
    for i in range(x.shape[1]):
        state = state * a.detach()[:, i] + x[:, i]
    return (state,)


def of_which_one_is_detached_afterwards(x, a, state):
    other = state.cos()
    for i in range(x.shape[1]):
        state = state * 0.5 + x[:, i]
        other = other * 0.5 + a[:, i]
    return state, other.detach()


def of_complex_numbers(x, a, state):
    turned = torch.complex(state, state.sin())
    for i in range(x.shape[1]):
        turned = turned * torch.complex(a[:, i], x[:, i])
    return (torch.view_as_real(turned),)


def of_views(x, a, state):
    """Operands that overlap themselves, and one that is no whole piece of memory."""
    rows, windows, part = state[:, None].expand(2, 9, 3), x.unfold(1, 2, 1), a[:, :9, 1:]
    for i in range(9):
        state = state * 0.5 + rows.view(2, 9, 3)[:, i] + windows[:, i].sum(-1) + part.sum(2)[:, i, None]
    return (state,)


PROGRAMS = (
    decays,
    keeps_the_largest,
    of_data_alone,
    writes_what_needs_no_gradient,
    detaches_its_state,
    reads_a_weight_detached,
    of_which_one_is_detached_afterwards,
    of_complex_numbers,
    of_views,
)


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("is_differentiable", [True, False])
def test_as_eager(fn, is_differentiable):
    run = compiled(fn)
    for length in (10, 13):
        given = loops.inputs(length)
        given[1].requires_grad_(is_differentiable)
        kept = [each for each in given if each.requires_grad]
        (found, wanted) = (each(*given) for each in (run.call, fn))
        assert [each.requires_grad for each in found] == [each.requires_grad for each in wanted]
        gradients = [
            torch.autograd.grad(sum(each.sin().sum() for each in ends if each.requires_grad), kept, allow_unused=True)
            for ends in (found, wanted)
        ]
        for got, want in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got, want)
    assert rolled(run) == len(run.graphs)


def of_layers(x, a, state):
    for _ in range(3):
        x, state = loops.recurrence(x, a, state)
    detached, last = loops.recurrence(x.float(), a.float(), state.float())
    return x, state, detached, last


def test_equal_bodies_are_differentiated_once(monkeypatch):
    asked = []
    monkeypatch.setattr(body, "step_gradients", lambda *given: asked.append(given) or step_gradients(*given))
    run, given = compiled(of_layers), loops.inputs(10)
    for got, want in zip(outcome(run.call, given), outcome(of_layers, given), strict=True):
        torch.testing.assert_close(got, want)
    assert rolled(run) == 4
    assert len(asked) == 2  # of float64, and of float32


def test_a_state_that_is_kept_over_steps_of_training():
    run, largest = compiled(keeps_the_largest), None
    for seed in range(3):
        x, a, state = loops.inputs(10, seed)
        with torch.no_grad():
            state[0, 0] = 1.0 if largest is None else largest
        loss, largest = run.call(x, a, state)
        loss.sum().backward()


def sums(x, a, state):
    out = torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = state * 0.5 + x[:, i]
        out[:, i] = state
    return out, state


def multiplies(x, a, state):
    for i in range(x.shape[1]):
        state = state * x[:, i]
    return (state,)


def gradients_after_a_write(run, given):
    """``x`` is an activation, whose memory is used again."""
    x = given[0] * 1
    found = run(x, *given[1:])
    with torch.no_grad():
        x.zero_()
    return torch.autograd.grad(sum(each.sum() for each in found), [given[0], given[2]])


def test_the_caller_may_write_what_eager_does_not_save():
    run, given = compiled(sums), loops.inputs(10)
    found, wanted = (gradients_after_a_write(fn, given) for fn in (run.call, sums))
    torch.testing.assert_close(found, wanted)
    assert rolled(run) == 1


def test_the_caller_may_not_write_what_eager_saves():
    run, given = compiled(multiplies), loops.inputs(10)
    for fn in (run.call, multiplies):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients_after_a_write(fn, given)
    assert rolled(run) == 1


def sums_and_writes(x, a, state):
    x = x * 1
    out, state = sums(x, a, state)
    return out, state, x.mul_(3)


def saves_results_and_writes(x, a, state):
    x = x * 1
    for i in range(x.shape[1]):
        state = torch.tanh(state + x[:, i])
    return state, x.mul_(3)


def saves_results_without_gradients_and_writes(x, a, state):
    y = x * 1
    with torch.no_grad():
        for i in range(x.shape[1]):
            state = torch.tanh(state + y[:, i])
    return state, y.mul_(3)


@pytest.mark.parametrize(
    ("fn", "count"),
    [(sums_and_writes, 1), (saves_results_without_gradients_and_writes, 1), (saves_results_and_writes, 0)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_write_behind_the_loop(fn, count):
    run, given = compiled(fn), loops.inputs(10)
    for got, want in zip(outcome(run.call, given), outcome(fn, given), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)
    assert rolled(run) == count
    assert len(run.session.capture_events) == 1 - count
    if not count:
        assert "what its gradients are computed from is written after it" in run.session.capture_events[0].reason
