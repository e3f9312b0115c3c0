"""The operator that runs a loop of equal steps: its states and all gradients are those of Python's loop."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from glue_compiler.ops.counted_loop import add_body


@fx.wrap
def set_item(tensor, index, value):
    tensor[index] = value


def step(i, state, out, x, decay, n):
    new = (state * decay[i]).sin() + x[:, i] / n
    set_item(out, (slice(None), i), new)
    return new, out


STEP = add_body(fx.symbolic_trace(step))


def eager(steps, state, out, x, decay, n):
    out = out.clone()
    for i in range(1, steps):
        state, out = step(i, state, out, x, decay, n)
    return state, out


def operands():
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3), (2, 5, 3), (2, 5, 3), (5,)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


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
