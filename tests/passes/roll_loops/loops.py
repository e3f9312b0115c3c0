"""Loops over chunks, as models write them, and what resembles them."""

from __future__ import annotations

import torch


def recurrence(x, a, state):
    """Each step reads its column, hands a state on, and writes its result into memory made before."""
    out = torch.zeros_like(x)
    for i in range(x.shape[1]):
        seen = x[:, i] - a[:, i] * state
        out[:, i] = seen.sin() + state
        state = state * a[:, i].cos() + seen
    return out, state


def of_two_states(x, a, state):
    other = state.cos()
    for i in range(x.shape[1]):
        state, other = state * a[:, i].sin() + other, other * 0.5 + x[:, i]
    return state, other * 2


def last_value_of_a_step(x, a, state):
    seen = state
    for i in range(x.shape[1]):
        seen = x[:, i] * a[:, i]
        state = state * 0.9 + seen.sin()
    return state, seen


def with_sizes(x, a, state):
    rows = x.shape[1]
    for i in range(rows):
        state = state.sin() + x[:, i] / rows + a[:, i].reshape(x.shape[0], -1)
    return state, state.cos()


def inside_of_a_function(x, a, state):
    def gated(value, gate):
        return value.sin() * torch.sigmoid(gate)

    out = torch.empty_like(x)
    for i in range(x.shape[1]):
        state = gated(state, a[:, i]) + x[:, i]
        out[:, i] = state
    return out.cos(), state


ROLLED = (recurrence, of_two_states, last_value_of_a_step, with_sizes, inside_of_a_function)


def counts_steps(x, a, state):
    seen = 0
    for i in range(x.shape[1]):
        state = state.sin() + x[:, i]
        seen += 1
    return state / seen, a * 1


def scales_by_the_step(x, a, state):
    for i in range(x.shape[1]):
        state = state.sin() + x[:, i] * i
    return state, a * 1


def branches_on_the_step(x, a, state):
    for i in range(x.shape[1]):
        if i == 3:
            state = state * 2
        state = state.sin() + x[:, i] * a[:, i]
    return state, state


def appends(x, a, state):
    found = []
    for i in range(x.shape[1]):
        state = state.sin() + x[:, i] * a[:, i]
        found.append(state)
    return torch.stack(found), state


def remembers_two_steps(x, a, state):
    before = earlier = state
    for i in range(x.shape[1]):
        state = x[:, i] + earlier * a[:, i]
        earlier, before = before, state
    return state, before


def swaps(x, a, state):
    other = state.cos()
    for i in range(x.shape[1]):
        state, other = other, state + x[:, i] * a[:, i]
    return state, other


def reads_what_it_writes(x, a, state):
    out = torch.zeros_like(x)
    for i in range(x.shape[1]):
        out[:, i] = x[:, i] + out.sum(1) * a[:, i]
    return out, state * 1


def writes_to_a_view(x, a, state):
    memory = torch.zeros_like(x)
    out = memory[:1]
    for i in range(x.shape[1]):
        out[:, i] = (x[:, i] * a[:, i])[:1]
    return memory, state * 1


def writes_to_an_input(x, a, state):
    kept = a.detach()
    for i in range(x.shape[1]):
        kept[:, i] = x[:, i].detach() + state.detach()
    return x * a, state * 1


def draws_numbers(x, a, state):
    for i in range(x.shape[1]):
        state = state + torch.nn.functional.dropout(x[:, i], 0.0) * torch.rand(()).round().clamp(1, 1) + a[:, i]
    return state, state


def goes_back(x, a, state):
    for i in range(x.shape[1]):
        state = state.sin() + x[:, -i]
    return state, a * 1


def looks_up(x, a, state):
    first = x[:, 0]
    table = {(0, i): x[:, i] if i > 1 else first for i in range(x.shape[1])}  # the same for two steps
    for i in range(x.shape[1]):
        state = state.sin() + table[0, i] * a[:, i]
    return state, state


def of_changing_dtype(x, a, state):
    state = state.float()
    for i in range(x.shape[1]):
        state = state + x[:, i] * a[:, i]
    return state, state


def switches_within_a_step(x, a, state):
    for i in range(x.shape[1]):
        with torch.no_grad():
            seen = x[:, i] * 2
        state = state.sin() + seen * a[:, i]
    return state, x * 1


LEFT = (
    counts_steps,
    scales_by_the_step,
    branches_on_the_step,
    appends,
    remembers_two_steps,
    swaps,
    writes_to_an_input,
    reads_what_it_writes,
    writes_to_a_view,
    draws_numbers,
    goes_back,
    looks_up,
    switches_within_a_step,
)


def inputs(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, length, 3), (2, length, 3), (2, 3)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
