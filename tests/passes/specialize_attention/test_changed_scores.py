"""Soft caps and attention sinks, as they may be written, beside near misses; against eager in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.captured import count
from tests.passes.specialize_attention.attention import (
    LENGTH,
    assert_as_eager,
    counts,
    inputs,
    run_as,
    specialized,
)
from tests.slow import one_in

T = LENGTH
LISTED = {"listed": 1}


def causal():
    token = torch.arange(T)
    return token[:, None] >= token


def some_keys(share=0.5):
    return torch.rand(2, 1, T, T, generator=torch.Generator().manual_seed(0)) < share


# -- soft caps


def capped_by(cap, mask=None):
    def fn(query, key, value, visible):
        scores = cap(query @ key.mT * 0.25)
        scores = scores.masked_fill(~visible, float("-inf")) if mask is None else mask(scores, visible)
        return F.softmax(scores, -1) @ value

    return fn


CAPS = {
    "divided and multiplied": (capped_by(lambda s: torch.tanh(s / 2.0) * 2.0), LISTED),
    "tanh alone": (capped_by(torch.tanh), LISTED),
    "other factors before and after": (capped_by(lambda s: 3.0 * (s * 0.4).tanh() / 2), LISTED),
    "through a conversion": (capped_by(lambda s: (s.double() / 2.0).tanh().to(torch.float64) * 2.0), LISTED),
    "under added numbers": (capped_by(lambda s: torch.tanh(s / 2.0) * 2.0, lambda s, v: s + v.double()), LISTED),
    "a tanh of queries that have no gradient": (
        lambda q, k, v, m: F.softmax((q.detach() @ k.mT / 2).tanh().masked_fill(~m, -1e30), -1) @ v,
        LISTED,
    ),
    "negative": (capped_by(lambda s: torch.tanh(s / -2.0) * 2.0), "changed in another way"),
    "an offset before": (capped_by(lambda s: torch.tanh(s / 2.0 + 1.0) * 2.0), "changed in another way"),
    "capped twice": (capped_by(lambda s: (s.tanh() * 2.0).tanh()), "changed in another way"),
    "capped after the mask": (
        capped_by(lambda s: s, lambda s, v: s.masked_fill(~v, -1e30).tanh()),
        "changed in another way",
    ),
    "sigmoid": (capped_by(torch.sigmoid), "changed in another way"),
    "no gradient in it": (capped_by(lambda s: without_gradients(torch.tanh, s)), "gradients are switched off"),
}


def without_gradients(fn, x):
    with torch.no_grad():
        return fn(x)


@pytest.mark.parametrize("spelling", CAPS)
def test_soft_caps(spelling):
    fn, expected = CAPS[spelling]
    assert_as_eager(fn, expected, [some_keys()], inputs(2))


def test_a_soft_cap_under_a_mask_that_is_proved():
    def fn(query, key, value):
        scores = torch.tanh(query @ key.mT / 2.0) * 2.0
        return F.softmax(scores.masked_fill(~causal(), float("-inf")), -1) @ value

    assert_as_eager(fn, LISTED)


def test_a_soft_cap_without_a_mask_stays():
    assert_as_eager(lambda q, k, v: F.softmax(torch.tanh(q @ k.mT), -1) @ v, "its scores are capped")


# -- attention sinks


def with_sinks(
    column=lambda sinks: sinks.reshape(1, -1, 1, 1).expand(2, -1, T, -1),
    mask=lambda scores, visible: scores.masked_fill(~visible, float("-inf")),
    join=lambda scores, column: torch.cat([scores, column], dim=-1),
    shift=lambda scores: scores,
    drop=lambda weights: weights[..., :-1],
):
    def fn(query, key, value, sinks, visible):
        scores = join(mask(query @ key.mT * 0.25, visible), column(sinks))
        return drop(F.softmax(shift(scores), dim=-1)) @ value

    return fn


def added(low):
    return lambda scores, visible: scores + torch.where(visible, 0.0, low).double()


SINKS = {
    "one a head": (with_sinks(), LISTED),
    "less the maximum": (with_sinks(shift=lambda s: s - s.max(dim=-1, keepdim=True).values), LISTED),
    "less the largest": (with_sinks(shift=lambda s: s - s.amax(-1, keepdim=True)), LISTED),
    "finite numbers filled in": (with_sinks(mask=lambda s, v: torch.where(v, s, -1e30)), LISTED),
    "minus infinity added": (with_sinks(mask=added(float("-inf"))), LISTED),
    "finite numbers added": (with_sinks(mask=added(-1e30)), LISTED),
    "narrowed": (with_sinks(drop=lambda w: w.narrow(-1, 0, T)), LISTED),
    "expanded from a view": (with_sinks(column=lambda s: s[None, :, None, None].expand(2, 2, T, 1)), LISTED),
    "less something else": (with_sinks(shift=lambda s: s - s.mean(-1, keepdim=True)), "no attention sinks"),
    "less the maximum over queries": (with_sinks(shift=lambda s: s - s.amax(-2, keepdim=True)), "no attention sinks"),
    "one a query": (
        with_sinks(column=lambda s: s.expand(T, 2).t()[None, :, :, None].expand(2, 2, T, 1) * 1.0),
        LISTED,
    ),
    "multiplied": (with_sinks(column=lambda s: s.reshape(1, -1, 1, 1).expand(2, -1, T, -1) * 2.0), LISTED),
    "the other way round": (
        with_sinks(join=lambda s, c: torch.cat([c, s], -1), drop=lambda w: w[..., :-1]),
        "no attention sinks|several dtypes|not known to fit|broadcast",
    ),
    "the first column is dropped": (with_sinks(drop=lambda w: w[..., 1:]), None),
    "without a mask": (with_sinks(mask=lambda s, v: s), {"packed": 1}),
    "no gradient": (with_sinks(column=lambda s: without_gradients(with_column, s)), LISTED),
}


def with_column(sinks):
    return sinks.reshape(1, -1, 1, 1).expand(2, -1, T, -1)


@pytest.mark.parametrize("share", [0.5, 0.15], ids=["no empty rows", "empty rows"])
@pytest.mark.parametrize("spelling", one_in(3, SINKS))
def test_sinks(spelling, share):
    fn, expected = SINKS[spelling]
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    visible = some_keys(share)
    assert visible.any(-1).all() == (share == 0.5)
    assert_as_eager(
        lambda *tensors: fn(*tensors, visible), {} if expected is None else expected, (), [*inputs(2), sinks]
    )


def test_sinks_under_a_mask_that_is_proved():
    fn = with_sinks()
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    assert_as_eager(lambda *tensors: fn(*tensors, causal()), {"packed": 1}, (), [*inputs(2), sinks])


def expanded_by_the_scores(query, key, value, sinks):
    token = torch.arange(query.shape[2])
    scores = torch.where(token[:, None] >= token, query @ key.mT * 0.25, float("-inf"))
    scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return F.softmax(scores, -1)[..., :-1] @ value


def test_indices_of_a_maximum_are_left_in_the_body_of_a_checkpoint():
    fn = with_sinks(shift=lambda s: s - s.max(-1, keepdim=True).values)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    assert_as_eager(
        lambda *each: checkpoint(fn, *each, causal(), use_reentrant=False), {"packed": 1}, (), [*inputs(2), sinks]
    )


def test_sizes_of_scores_are_left_in_the_body_of_a_checkpoint_when_lengths_vary():
    def fn(*tensors):
        return checkpoint(expanded_by_the_scores, *tensors, use_reentrant=False)

    run = specialized(fn)
    for length in (8, 12):
        shapes = [(1, 4, length, 16)] * 3 + [(4,)]
        tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        run.call(*tensors)
    assert [report.passes[0].counts["packed"] for report in run.session.graphs] == [1, 1]


@pytest.mark.parametrize("form", ["packed", "listed"])
def test_who_calls_may_write_sinks_before_backward(form):
    """A column of the scores is not saved for it."""

    def fn(query, key, value, sinks, visible):
        return with_sinks()(query, key, value, sinks, causal() if form == "packed" else visible)

    drawn = [*inputs(2), torch.tensor([0.5, -1.0], dtype=torch.float64)]

    def gradients(call):
        tensors = [each.detach().clone().requires_grad_() for each in drawn]
        out = call(*tensors, some_keys())
        with torch.no_grad():
            tensors[-1].zero_()
        return torch.autograd.grad(out.sin().sum(), tensors)

    run = specialized(fn)
    for got, want in zip(gradients(run.call), gradients(fn), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert counts(run) == {form: 1}


def test_sinks_written_before_backward_stay():
    def fn(query, key, value, sinks, visible):
        sinks = sinks * 2
        out = with_sinks()(query, key, value, sinks, visible)
        sinks.data.zero_()
        return out

    run = specialized(fn)
    run.call(*inputs(2), torch.zeros(2, dtype=torch.float64, requires_grad=True), some_keys())
    assert counts(run) == {}
    assert "written in place later" in run.skip_reasons[0]


# -- numbers that are added, and a mask that is filled in


def alibi():
    return torch.tensor([0.5, 0.25], dtype=torch.float64)[:, None, None] * (torch.arange(T) - T)


def biased(bias, hide=lambda scores, visible: scores.masked_fill(~visible, float("-inf"))):
    def fn(query, key, value, visible):
        return F.softmax(hide(bias(query @ key.mT * 0.25), visible), -1) @ value

    return fn


BIASES = {
    "added": (biased(lambda s: s + alibi()), LISTED),
    "first": (biased(lambda s: torch.add(alibi(), s)), LISTED),
    "filled with a finite number": (
        biased(lambda s: s + alibi(), lambda s, v: torch.where(v, s, -1e30)),
        LISTED,
    ),
    "after a soft cap": (biased(lambda s: torch.tanh(s) * 2.0 + alibi()), LISTED),
    "converted afterwards": (biased(lambda s: (s + alibi()).to(torch.float64)), LISTED),
    "scaled afterwards": (biased(lambda s: (s + alibi()) * 2.0), "changed in another way"),
    "before a soft cap": (biased(lambda s: torch.tanh(s + alibi())), "changed in another way"),
    "with another factor": (biased(lambda s: torch.add(s, alibi(), alpha=2)), "changed in another way"),
    "twice": (biased(lambda s: s + alibi() + alibi()), "changed in another way"),
    "integers": (biased(lambda s: s + torch.arange(T)), "are added to the scores"),
    "a mask added after it": (
        biased(lambda s: s + alibi(), lambda s, v: s + torch.where(v, 0.0, -1e30).double()),
        LISTED,
    ),
}


@pytest.mark.parametrize("share", [0.5, 0.15], ids=["no empty rows", "empty rows"])
@pytest.mark.parametrize("spelling", one_in(3, BIASES))
def test_numbers_added_beside_a_mask(spelling, share):
    fn, expected = BIASES[spelling]
    assert_as_eager(fn, expected, [some_keys(share)], inputs(2))


def test_numbers_added_beside_a_mask_that_is_proved():
    assert_as_eager(lambda *tensors: biased(lambda s: s + alibi())(*tensors, causal()), LISTED, eager=False)


HIDDEN = {
    "filled in": lambda scores, visible: scores.masked_fill(~visible, float("-inf")),
    "added": lambda scores, visible: scores + torch.where(visible, 0.0, -1e30).double(),
    "added in place": lambda scores, visible: scores.add_(torch.where(visible, 0.0, -1e30).double()),
}


@pytest.mark.parametrize("eager", one_in(2, [True, False]), ids=["the graph", "compiled"])
@pytest.mark.parametrize("share", [0.5, 0.15], ids=["no empty rows", "empty rows"])
@pytest.mark.parametrize("hidden", one_in(2, HIDDEN))
@pytest.mark.parametrize("shape", [(1, 2, T, T), (2, 1, 1), (1, 1, T, 1)], ids=str)
def test_numbers_with_a_gradient_beside_a_mask(shape, hidden, share, eager):
    visible = some_keys(share)

    def fn(query, key, value, bias):
        return biased(lambda s: s + bias, HIDDEN[hidden])(query, key, value, visible)

    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert_as_eager(fn, LISTED, tensors=[*inputs(2), bias], eager=eager)


def test_numbers_that_are_added_twice_are_summed_once_for_all_layers():
    def fn(query, key, value, bias, visible):
        hide = torch.where(visible, 0.0, -1e30).double()
        for _ in range(3):
            query = F.softmax(query @ key.mT * 0.25 + bias + hide, -1) @ value
        return query

    run, bias = specialized(fn), torch.randn(2, T, T, dtype=torch.float64, requires_grad=True)
    visible = some_keys()
    assert_as_eager(lambda *given: fn(*given, visible), {"listed": 3}, tensors=[*inputs(2), bias])
    run.call(*inputs(2), bias, some_keys())
    assert counts(run) == {"listed": 3}
    assert count(run.graph, torch.ops.glue.mask_blocks.default) == 1


@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min], ids=str)
def test_numbers_that_hide_all_keys_that_a_mask_shows(low):
    """In fp32, which has no digits left beside such a number: weights have to be found again in backward."""
    hidden = torch.zeros(2, 1, 1, T).index_fill(-1, torch.arange(5), low)

    def fn(query, key, value):
        return biased(lambda s: s + hidden)(query, key, value, causal())

    run, tensors = specialized(fn), [each.detach().float().requires_grad_() for each in inputs(2)]
    wanted, found = (run_as(call, tensors, []) for call in (fn, run.call))
    assert counts(run) == LISTED
    for got, want in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_finite_numbers_filled_in_beside_numbers_that_hide_what_the_mask_shows():
    """A query that sees no key that is shown gets those that are hidden by less."""
    hidden = torch.zeros(2, 1, 1, T, dtype=torch.float64).index_fill(-1, torch.arange(5), float("-inf"))

    def fn(query, key, value):
        return biased(lambda s: s + hidden, lambda s, v: torch.where(v, s, -1e30))(query, key, value, causal())

    assert_as_eager(fn, LISTED, tensors=inputs(2))
