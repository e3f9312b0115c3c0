"""Weights filled in after softmax, and results multiplied by what sinks leave of them; beside near misses."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import LENGTH, assert_as_eager, inputs, specialized
from tests.slow import one_in

T = LENGTH
LISTED = {"listed": 1}
INFINITE = float("-inf")
TOKEN = torch.arange(T)
CAUSAL = TOKEN[:, None] >= TOKEN


def some_keys(share=0.5):
    return torch.rand(2, 1, T, T, generator=torch.Generator().manual_seed(0)) < share


def zero():
    return torch.zeros((), dtype=torch.float64)


# -- weights that are filled in


def filled(change, low=INFINITE, hide=lambda scores, visible, low: scores.masked_fill(~visible, low)):
    """``change``: (weights, mask) → weights, as cpmant of transformers fills in zeros."""

    def fn(query, key, value, visible):
        return change(F.softmax(hide(query @ key.mT * 0.25, visible, low), -1), visible) @ value

    return fn


ELSEWHERE = "filled in elsewhere"
FILLED = {
    "masked_fill": (filled(lambda w, m: w.masked_fill(~m, 0.0)), LISTED),
    "a tensor": (filled(lambda w, m: torch.masked_fill(w, m == torch.tensor(False), torch.scalar_tensor(0.0))), LISTED),
    "where": (filled(lambda w, m: torch.where(m, w, zero())), LISTED),
    "after finite numbers": (filled(lambda w, m: w.masked_fill(~m, 0.0), -1e30), LISTED),
    "after dropout": (filled(lambda w, m: F.dropout(w, 0.1, training=False).masked_fill(~m, 0.0)), LISTED),
    "twice": (filled(lambda w, m: w.masked_fill(~m, 0.0).masked_fill(~m, 0.0)), LISTED),
    "not zero": (filled(lambda w, m: w.masked_fill(~m, 1e-3)), ELSEWHERE),
    "where the mask shows": (filled(lambda w, m: w.masked_fill(m, 0.0)), ELSEWHERE),
    "somewhere else": (filled(lambda w, m: w.masked_fill(~m.roll(1, -1), 0.0)), ELSEWHERE),
    "in fewer places": (filled(lambda w, m: w.masked_fill(~m & (TOKEN > 3), 0.0)), ELSEWHERE),
    "the mask of another row": (filled(lambda w, m: w.masked_fill(~m.flip(0), 0.0)), ELSEWHERE),
    "a mask that is added": (
        filled(lambda w, m: w.masked_fill(~m, 0.0), hide=lambda s, m, low: s + torch.where(m, zero(), low)),
        ELSEWHERE,
    ),
    "one of two masks": (
        filled(lambda w, m: w.masked_fill(~m, 0.0), hide=lambda s, m, low: torch.where(m & CAUSAL, s, low)),
        ELSEWHERE,
    ),
    "the first of two fillings": (
        filled(
            lambda w, m: w.masked_fill(~m, 0.0),
            hide=lambda s, m, low: s.masked_fill(~m, low).masked_fill(~CAUSAL, low),
        ),
        ELSEWHERE,
    ),
    "zeros with a gradient": (filled(lambda w, m: torch.where(m, w, w.sum() * zero())), "elsewhere"),
}


@pytest.mark.parametrize("share", [0.5, 0.15], ids=["no empty rows", "empty rows"])
@pytest.mark.parametrize("name", FILLED)
def test_zeros_that_are_filled_in_the_weights(name, share):
    visible = some_keys(share)
    assert visible.any(-1).all() == (share == 0.5)
    assert_as_eager(*FILLED[name], [visible], inputs(2))


@pytest.mark.parametrize(("low", "expected"), [(INFINITE, LISTED), (-1e30, "added to its scores before finite ones")])
def test_zeros_that_are_filled_in_beside_a_learned_bias(low, expected):
    visible = some_keys(0.15)

    def fn(query, key, value, bias):
        hidden = filled(lambda w, m: w.masked_fill(~m, 0.0), low, lambda s, m, low: (s + bias).masked_fill(~m, low))
        return hidden(query, key, value, visible)

    bias = torch.randn(1, 2, T, T, dtype=torch.float64, requires_grad=True)
    assert_as_eager(fn, expected, tensors=[*inputs(2), bias])


def test_zeros_that_are_filled_in_under_a_mask_that_is_proved():
    def fn(query, key, value):
        token = torch.arange(T)
        return filled(lambda w, m: w.masked_fill(~m, 0.0))(query, key, value, token[:, None] >= token)

    assert_as_eager(fn, {"causal": 1})


@pytest.mark.parametrize(("heads", "expected"), [(2, ELSEWHERE), (1, LISTED)])
def test_zeros_that_are_filled_in_rows_and_heads_that_are_one_dimension(heads, expected):
    """A mask for each head says nothing of those of the second row, and one for all heads does."""
    hidden = torch.rand(2 * heads, T, T, generator=torch.Generator().manual_seed(0)) < 0.5
    hidden = hidden if heads > 1 else hidden[:1]

    def fn(query, key, value, hidden):
        scores = (query @ key.mT * 0.25).masked_fill(hidden[:heads], INFINITE)
        weights = F.softmax(scores.flatten(0, 1), -1).masked_fill(hidden, 0.0)
        return weights @ value.flatten(0, 1)

    assert_as_eager(fn, expected, [hidden], inputs(2))


# -- results that are multiplied by sigmoid(logsumexp(scores) - sinks)


def lse(scores, sinks):
    return torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)


def gated(
    logit=lse,
    gate=lambda logit: logit.sigmoid().unsqueeze(-1),
    mask=lambda scores, visible: scores.masked_fill(~visible, INFINITE),
    weigh=lambda scores: F.softmax(scores, -1),
    join=torch.mul,
):
    """As granite_swa of transformers has sinks."""

    def fn(query, key, value, sinks, visible):
        scores = mask(query @ key.mT * 0.25, visible)
        return join(weigh(scores) @ value, gate(logit(scores, sinks)))

    return fn


def added(low):
    return lambda scores, visible: scores + torch.where(visible, 0.0, low).double()


def without_gradients(fn, *given):
    with torch.no_grad():
        return fn(*given)


def beside(out, gate):
    return out * gate, gate


USED = "used elsewhere"
GATES = {
    "minus infinity filled in": (gated(), LISTED),
    "finite numbers filled in": (gated(mask=lambda s, m: torch.where(m, s, -1e30)), LISTED),
    "minus infinity added": (gated(mask=added(INFINITE)), LISTED),
    "finite numbers added": (gated(mask=added(-1e30)), LISTED),
    "keepdim": (
        gated(lambda s, sinks: s.logsumexp(-1, keepdim=True) - sinks[:, None, None], gate=torch.sigmoid),
        LISTED,
    ),
    "expanded": (gated(gate=lambda logit: torch.sigmoid(logit[..., None].expand(-1, -1, -1, 16))), LISTED),
    "the other way round": (gated(join=lambda out, gate: gate * out), LISTED),
    "special": (gated(gate=lambda logit: torch.special.expit(logit).unsqueeze(3)), LISTED),
    "scaled after the mask": (gated(mask=lambda s, m: s.masked_fill(~m, INFINITE) * 2.0), LISTED),
    "less the maximum": (
        gated(mask=lambda s, m: (t := s.masked_fill(~m, -1e30)) - t.amax(-1, keepdim=True)),
        USED,
    ),
    "of scores before the mask": (
        gated(mask=lambda s, m: s, weigh=lambda s: F.softmax(s.masked_fill(~CAUSAL, INFINITE), -1)),
        USED,
    ),
    "of other scores": (gated(lambda s, sinks: lse(s + 1.0, sinks)), USED),
    "over queries": (gated(lambda s, sinks: s.logsumexp(-2) - sinks.view(1, -1, 1)), USED),
    "of another query": (gated(lambda s, sinks: lse(s, sinks).roll(1, -1)), USED),
    "of the head beside": (gated(lambda s, sinks: lse(s, sinks).flip(1)), USED),
    "rows and heads swapped": (gated(lambda s, sinks: lse(s, sinks).transpose(0, 1)), USED),
    "the other sign": (gated(lambda s, sinks: -lse(s, sinks)), USED),
    "twice the sinks": (gated(lambda s, sinks: torch.sub(s.logsumexp(-1), sinks.view(1, -1, 1), alpha=2)), USED),
    "no sigmoid": (gated(gate=lambda logit: logit.tanh().unsqueeze(-1)), USED),
    "divided": (gated(join=torch.div), USED),
    "used beside it": (gated(join=beside), USED),
    "a sink for each head and query": (
        gated(lambda s, sinks: s.logsumexp(-1) - sinks.view(1, -1, 1) * (TOKEN + 1.0)),
        LISTED,
    ),
    "a sink for each row": (
        gated(lambda s, sinks: s.logsumexp(-1) - sinks.view(-1, 1, 1).clone()),
        LISTED,
    ),
    "a sink for each query": (
        gated(lambda s, sinks: s.logsumexp(-1) - torch.outer(sinks, TOKEN + 1.0)[:1]),
        LISTED,
    ),
    "a sink for each query without a dimension of heads": (
        gated(lambda s, sinks: s.logsumexp(-1) - (sinks[0] * TOKEN)),
        "sinks that are not in memory",
    ),
    "no gradient of the gate": (
        gated(gate=lambda logit: without_gradients(lambda each: each.sigmoid().unsqueeze(-1), logit)),
        "gradients are switched off",
    ),
    "no gradient of the scores": (gated(lambda s, sinks: lse(s.detach(), sinks)), USED),
    "a detached gate": (gated(gate=lambda logit: logit.sigmoid().unsqueeze(-1).detach()), USED),
    "rounded": (gated(gate=lambda logit: logit.float().sigmoid().unsqueeze(-1)), "several dtypes"),
    "without a mask": (gated(mask=lambda s, m: s), {"packed": 1}),
}


@pytest.mark.parametrize("share", [0.5, 0.15], ids=["no empty rows", "empty rows"])
@pytest.mark.parametrize("name", one_in(3, GATES))
def test_results_multiplied_by_what_sinks_leave(name, share):
    fn, expected = GATES[name]
    visible = some_keys(share)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    assert_as_eager(lambda *tensors: fn(*tensors, visible), expected, (), [*inputs(2), sinks])


def test_a_gate_says_one_reason_and_not_another_for_its_product():
    run = specialized(gated(mask=lambda s, m: s.tanh()))
    run.call(*inputs(2), torch.zeros(2, dtype=torch.float64, requires_grad=True), some_keys())
    (reason,) = run.skip_reasons
    assert "its scores are capped" in reason


def test_a_gate_under_a_causal_mask_that_is_an_input_and_one_that_is_proved():
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    assert_as_eager(lambda *tensors: gated()(*tensors, TOKEN[:, None] >= TOKEN), LISTED, (), [*inputs(2), sinks])

    def made_in_the_graph(*tensors):
        token = torch.arange(len(TOKEN))
        return gated()(*tensors, token[:, None] >= token)

    assert_as_eager(made_in_the_graph, {"packed": 1}, (), [*inputs(2), sinks])
