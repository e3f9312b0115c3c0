"""What one step of a loop tells of the gradients of many."""

from __future__ import annotations

import torch

from glue_compiler.ops.loop_gradients import step_gradients


def numbers(*shape, dtype=torch.float64):
    return torch.ones(shape, dtype=dtype)


def of(step, *states, fixed=()):
    return step_gradients(step, states, fixed, [])


def test_a_sum_is_differentiated_without_its_operands():
    found = of(lambda i, state, x: (state * 0.5 + x[i],), numbers(3), fixed=[numbers(5, 3)])
    assert found.read == ({0: (), 1: ()},)
    assert found.made_of == ((0, 1),)
    assert found.saved([True, True]) == set()


def test_a_product_is_differentiated_with_the_other_operand():
    found = of(lambda i, state, x: (state * x[i],), numbers(3), fixed=[numbers(5, 3)])
    assert found.read == ({0: (1,), 1: (0,)},)
    assert found.saved([True, False]) == {1}
    # The second step's state is made of ``x``, and needs a gradient as the first one's does.
    assert found.saved([False, True]) == {0, 1}


def test_what_makes_what_is_read_is_saved_too():
    found = of(lambda i, state, x: (torch.tanh(state + x[i]),), numbers(3), fixed=[numbers(5, 3)])
    assert found.read == ({0: (0, 1), 1: (0, 1)},)


def test_what_is_read_is_made_of_the_step_before():
    def step(i, state, factor, x, y):
        return state + factor * x[i], factor + y[i]

    found = of(step, numbers(3), numbers(3), fixed=[numbers(5, 3), numbers(5, 3)])
    assert found.saved([False, False, True, False]) == {1, 3}
    assert found.saved([True, False, False, False]) == set()


def test_a_detached_value_has_no_gradient():
    found = of(lambda i, state, x: (state.detach() + x[i],), numbers(3), fixed=[numbers(5, 3)])
    assert found.read == ({1: ()},)


def test_a_state_reaches_others_over_several_steps():
    found = of(lambda i, a, b, c: (a + b, b + c, c * 0.5), *[numbers(3)] * 3)
    assert found.given([0]) == {0, 1, 2}
    assert found.given([1]) == {1, 2}
    assert found.differentiable([False, False, True, False]) == {0, 1, 2}
    assert found.differentiable([False, True, False]) == {0, 1}


def step_that_writes(i, out, x):
    out[:, i] = x[:, i] * 2
    return (out,)


def test_memory_that_is_written():
    found = of(step_that_writes, numbers(2, 5), fixed=[numbers(2, 5)])
    assert found.read == ({0: (), 1: ()},)
    assert found.made_of == ((0, 1),)


def test_a_state_is_not_made_of_the_memory_that_it_is_written_to():
    def step(i, state, out, x):
        state = torch.tanh(state + x[:, i])
        out[:, i] = state
        return state, out

    found = of(step, numbers(2), numbers(2, 5), fixed=[numbers(2, 5)])
    assert found.made_of == ((0, 2), (0, 1, 2))
    assert found.read[0] == {0: (0, 2), 2: (0, 2)}


def test_memory_that_is_written_and_read():
    def step(i, out, x):
        step_that_writes(i, out, x)
        return (out.sin(),)

    assert of(step, numbers(2, 5), fixed=[numbers(2, 5)]).read == ({0: (0, 1), 1: (0, 1)},)


def test_numbers_without_gradients():
    found = of(lambda i, state, at: (state[at[i]],), numbers(3), fixed=[numbers(5, 3, dtype=torch.int64)])
    assert found.read == ({0: (1,)},)


def test_complex_numbers_have_gradients():
    found = of(lambda i, state, w: (state * w,), numbers(3, dtype=torch.complex128), fixed=[numbers(3)])
    assert found.read == ({0: (1,), 1: (0,)},)


@torch.inference_mode()
def test_in_inference_mode():
    found = of(lambda i, state, x: (state * x[i],), numbers(3), fixed=[numbers(5, 3)])
    assert found.read == ({0: (1,), 1: (0,)},)
