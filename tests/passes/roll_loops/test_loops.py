"""Loops over chunks: one graph for all lengths where steps are proved equal, else each length as eager runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.captured import compile_with_glue
from tests.passes.roll_loops import loops
from tests.slow import one_in

LENGTHS = (10, 13, 9, 21)


def compiled(fn, **how):
    return compile_with_glue(fn, fullgraph=False, passes={"roll_loops": True}, **how)


def outcome(run, given):
    found = run(*given)
    weighed = [(each * each.cos()).sum() for each in found if each.requires_grad]
    gradients = torch.autograd.grad(sum(weighed), given, allow_unused=True)
    return [*found, *gradients]


def assert_as_eager(run, fn, given):
    for got, want in zip(outcome(run, given), outcome(fn, given), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)


def rolled(run):
    return sum(dict(report.counts).get("loops_rolled", 0) for graph in run.session.graphs for report in graph.passes)


@pytest.mark.parametrize("fn", loops.ROLLED, ids=lambda fn: fn.__name__)
def test_one_graph_serves_all_lengths(fn):
    run = compiled(fn)
    for length in LENGTHS:
        assert_as_eager(run.call, fn, loops.inputs(length, seed=length))
    assert len(run.graphs) == 2 == rolled(run)  # of fixed and of varying sizes


@pytest.mark.parametrize("fn", one_in(3, loops.LEFT), ids=lambda fn: fn.__name__)
def test_what_is_not_proved_runs_as_eager_does(fn):
    run = compiled(fn)
    for length in LENGTHS[:2]:
        assert_as_eager(run.call, fn, loops.inputs(length, seed=length))
    assert rolled(run) == 0


def test_a_state_that_changes_its_dtype_in_the_first_step():
    run = compiled(loops.of_changing_dtype)
    assert_as_eager(run.call, loops.of_changing_dtype, loops.inputs(10))


def test_few_steps_of_a_fixed_size_stay_in_the_graph():
    run = compiled(loops.recurrence)
    assert_as_eager(run.call, loops.recurrence, loops.inputs(5))
    assert rolled(run) == 0
    assert not run.session.capture_events


def test_the_graph_does_not_grow_with_the_length():
    short, long = compiled(loops.recurrence), compiled(loops.recurrence)
    short.call(*loops.inputs(8))
    torch._dynamo.reset()  # or the size of the second call varies
    long.call(*loops.inputs(200))
    assert len(short.graph.graph.nodes) == len(long.graph.graph.nodes)


@pytest.mark.slow
def test_after_another_backend_has_compiled_a_loop():
    """Dynamo remembers, for a whole process, how ranges are traced."""
    script = """
import torch
from tests.passes.roll_loops import loops
from tests.passes.roll_loops.test_loops import compiled, rolled

torch.compile(loops.of_two_states, backend="eager")(*loops.inputs(9))
run = compiled(loops.recurrence)
run.call(*loops.inputs(10))
run.call(*loops.inputs(13))
assert rolled(run) == 2
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def in_a_checkpoint(x, a, state):
    return checkpoint(loops.recurrence, x, a, state, use_reentrant=False)


def test_in_a_checkpoint():
    run = compiled(in_a_checkpoint)
    assert_as_eager(run.call, in_a_checkpoint, loops.inputs(10))
    assert rolled(run) == 1


def in_half_precision(x, a, state):
    """In fp32, as products are cast from it alone; each step's product is rounded to bfloat16."""
    x, a, state = x.float(), a.float(), state.float()
    for i in range(x.shape[1]):
        state = state * 0.5 + (x[:, i] @ a[:, i].mT) @ state
    return state, state * 2


def under_autocast(x, a, state):
    with torch.autocast("cpu", torch.bfloat16):
        return in_half_precision(x, a, state)


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("compiler", one_in(2, ["aot_eager", "inductor"]))
def test_under_autocast(is_inside, compiler):
    fn = under_autocast if is_inside else in_half_precision
    run, given = compiled(fn, compiler=compiler), loops.inputs(10)
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_inside):
        found, wanted = run.call(*given), fn(*given)
    assert rolled(run) == 1
    gradients = [torch.autograd.grad(sum(each.sum() for each in results), given) for results in (found, wanted)]
    for got, want in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert not torch.equal(wanted[0], in_half_precision(*given)[0])


def test_without_gradients():
    run, given = compiled(loops.recurrence), loops.inputs(10)
    with torch.no_grad():
        for got, want in zip(run.call(*given), loops.recurrence(*given), strict=True):
            torch.testing.assert_close(got, want)
    assert rolled(run) == 1


def test_two_forwards_before_a_backward():
    run = compiled(loops.recurrence)
    first, second = loops.inputs(10, 1), loops.inputs(10, 2)

    def losses(call):
        return [sum((each * each).sum() for each in call(*given)) for given in (first, second)]

    found = [torch.autograd.grad(loss, given) for loss, given in zip(losses(run.call), (first, second), strict=True)]
    wanted = [
        torch.autograd.grad(loss, given) for loss, given in zip(losses(loops.recurrence), (first, second), strict=True)
    ]
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_inductor_computes_the_same():
    run = compiled(loops.recurrence, compiler="inductor")
    for length in LENGTHS[:2]:
        assert_as_eager(run.call, loops.recurrence, loops.inputs(length, seed=length))
    assert rolled(run) == 2


def test_switched_off_it_is_unrolled():
    run = compile_with_glue(loops.recurrence, passes={"roll_loops": False})
    assert_as_eager(run.call, loops.recurrence, loops.inputs(10))
    assert not run.graph.graph.find_nodes(op="call_function", target=torch.ops.glue.counted_loop.default)


def of_a_state_that_nothing_reads(x, a, state):
    other = state.detach() + 1
    for i in range(x.shape[1]):
        state = state * a[:, i].cos() + x[:, i]
        other = other.cos() + state
    return (state,)


def test_a_state_that_nothing_reads_has_no_part_in_gradients():
    """Else zeros are multiplied with what is not finite."""
    run, (x, a, state) = compiled(of_a_state_that_nothing_reads), loops.inputs(10)
    with torch.no_grad():
        state[0, 0] = torch.inf
    (found,), (wanted,) = (fn(x, a, state) for fn in (run.call, of_a_state_that_nothing_reads))
    assert rolled(run) == 1
    gradients = [torch.autograd.grad(each.sum(), [x, state]) for each in (found, wanted)]
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[1][0].isfinite().all()
