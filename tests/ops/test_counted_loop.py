"""The operator that runs a loop of equal steps: its states and all gradients are those of Python's loop."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from glue_compiler.ops.counted_loop import add_body
from glue_compiler.ops.loop_gradients import step_gradients


@fx.wrap
def set_item(tensor, index, value):
    tensor[index] = value


def step(i, state, out, x, decay, n):
    new = (state * decay[i]).sin() + x[:, i] / n
    set_item(out, (slice(None), i), new)
    return new, out


def eager(steps, state, out, x, decay, n):
    out = out.clone()
    for i in range(1, steps):
        state, out = step(i, state, out, x, decay, n)
    return state, out


def operands():
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3), (2, 5, 3), (2, 5, 3), (5,)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def added(step, states, fixed, sizes=()):
    graph = fx.symbolic_trace(step)
    return add_body(graph, step_gradients(graph, states, fixed, sizes))


STEP = added(step, operands()[:2], operands()[2:], [2])


def rolled(steps, state, out, x, decay, n):
    return torch.ops.glue.counted_loop(STEP, steps, [state, out], [x, decay], [n])


def outcome(run, steps):
    given = operands()
    found = run(steps, *given, 2)
    gradients = torch.autograd.grad(sum((each * each.cos()).sum() for each in found), given, allow_unused=True)
    return [*found, *gradients]


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_it_is_the_loop(steps, backend):
    run = rolled if backend is None else torch.compile(rolled, backend=backend, fullgraph=True)
    for got, want in zip(outcome(run, steps), outcome(eager, steps), strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want)


def test_operands_are_left_as_they_were():
    given = operands()
    before = [each.detach().clone() for each in given]
    rolled(5, *given, 2)
    assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))


def test_schema_and_gradients_as_torch_checks_them():
    state, out, x, decay = operands()
    torch.library.opcheck(torch.ops.glue.counted_loop, (STEP, 4, [state, out], [x, decay], [2]))


def of_two(i, state, other, x, y):
    return state * 0.5 + x[:, i], other.detach() * y[:, i]


OF_TWO = added(of_two, [torch.ones(2, 3)] * 2, [torch.ones(2, 5, 3)] * 2)


def outcome_of_two(**needs):
    given = [torch.ones(2, 3, dtype=torch.float64) for _ in range(2)]
    given += [torch.ones(2, 5, 3, dtype=torch.float64) for _ in range(2)]
    for each, name in zip(given, ("state", "other", "x", "y"), strict=True):
        each.requires_grad_(needs.get(name, False))
    return given, torch.ops.glue.counted_loop(OF_TWO, 5, given[:2], given[2:], [])


def test_results_need_gradients_only_where_operands_of_theirs_do():
    for needs, expected in (
        ({"x": True}, [True, False]),
        ({"state": True}, [True, False]),
        ({"y": True}, [False, True]),
        ({"x": True, "y": True}, [True, True]),
        ({}, [False, False]),
    ):
        _, ends = outcome_of_two(**needs)
        assert [end.requires_grad for end in ends] == expected


def test_an_operand_without_a_part_in_the_used_result_has_no_gradient():
    given, ends = outcome_of_two(state=True, x=True, y=True)
    found = torch.autograd.grad(ends[0].sum(), [given[0], given[2], given[3]], allow_unused=True)
    assert [each is None for each in found] == [False, False, True]


def test_operands_that_gradients_are_not_computed_from_may_be_written():
    given, ends = outcome_of_two(x=True)
    with torch.no_grad():
        for each in given:
            each.mul_(torch.nan)
    (found,) = torch.autograd.grad(ends[0].sum(), given[2])
    wanted = torch.tensor([0, 0.125, 0.25, 0.5, 1], dtype=torch.float64).view(1, 5, 1).expand(2, 5, 3)
    torch.testing.assert_close(found, wanted)


def test_an_operand_that_overlaps_itself():
    state, row = (torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (3,)))
    x = row.expand(2, 5, 3)
    ends = torch.ops.glue.counted_loop(OF_TWO, 5, [state, state], [x, x], [])
    (found,) = torch.autograd.grad(ends[0].sum(), row)
    torch.testing.assert_close(found, torch.full_like(row, 2 * (1 + 0.5 + 0.25 + 0.125)))


def test_operands_that_gradients_are_computed_from_may_not():
    given = operands()
    ends = rolled(5, *given, 2)
    with torch.no_grad():
        given[3].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ends[0].sum().backward()
