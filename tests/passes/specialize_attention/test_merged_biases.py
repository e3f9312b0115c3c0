"""Numbers that are added to scores ``[B * H, T, T]``, for each row and head together; beside near misses."""

import pytest
import torch
import torch.nn.functional as F

from tests.captured import count
from tests.passes.specialize_attention.attention import (
    LENGTH,
    assert_as_eager,
    assert_close,
    counts,
    inputs,
    specialized,
)
from tests.slow import one_in

T = LENGTH
LISTED = {"listed": 1}
CHANGED = "changed in another way"


def causal(rows=2):
    token = torch.arange(T)
    return (token[:, None] >= token).expand(rows, 1, T, T) & (token != torch.arange(1, rows + 1)[:, None, None, None])


def filled(scores):
    return scores.masked_fill(~causal(), float("-inf"))


def finite(scores):
    return scores.masked_fill(~causal(), -1e30)


def hidden(low):
    return lambda scores: scores + torch.where(causal(), 0.0, low).double()


def alibi(batch=2):
    """As bloom of transformers makes it, from which keys a row sees."""
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    places = torch.arange(T) * torch.arange(1, batch + 1)[:, None]
    return (slopes[..., None] * places[:, None]).reshape(-1, 1, T)


HIDDEN = hidden(-1e30)


def attention(add, mask=HIDDEN, again=lambda scores: scores):
    """``add``: (bias, query, key transposed) → scores ``[B * H, T, T]``."""

    def fn(query, key, value, bias):
        rows = [each.reshape(-1, T, 16) for each in (query, key, value)]
        scores = again(add(bias, rows[0], rows[1].mT)).view(2, -1, T, T)
        return torch.bmm(F.softmax(mask(scores), -1).view(-1, T, T), rows[2]).view(query.shape)

    return fn


def baddbmm(bias, query, key, alpha=0.25, beta=1):
    return torch.baddbmm(bias, query, key, alpha=alpha, beta=beta)


ADDED = {
    "under a mask that is added": (attention(baddbmm), LISTED),
    "under minus infinity that is added": (attention(baddbmm, hidden(float("-inf"))), LISTED),
    "under a mask that is filled in": (attention(baddbmm, filled), LISTED),
    "by a method": (attention(lambda b, q, k: b.baddbmm(batch1=q, batch2=k, beta=1.0, alpha=0.25)), LISTED),
    "after the product": (attention(lambda b, q, k: torch.bmm(q, k) * 0.25 + b), LISTED),
    "for all rows and heads": (attention(lambda b, q, k: baddbmm(b[:1], q, k)), LISTED),
    "for keys alone": (attention(lambda b, q, k: baddbmm(b[0, 0], q, k)), LISTED),
    "doubled": (attention(lambda b, q, k: baddbmm(2 * b, q, k)), LISTED),
    "not read": (attention(lambda b, q, k: baddbmm(b, q, k, beta=0), filled), LISTED),
    "of rows in another order": (attention(lambda b, q, k: baddbmm(b.flip(0), q, k)), LISTED),
    "under a finite number that is filled in": (attention(baddbmm, finite), LISTED),
    "by another factor": (attention(lambda b, q, k: baddbmm(b, q, k, beta=2)), CHANGED),
    "scaled afterwards": (attention(baddbmm, again=lambda s: s * 2.0), CHANGED),
    "capped afterwards": (attention(baddbmm, again=torch.tanh), CHANGED),
    "and something else": (attention(baddbmm, again=lambda s: s + torch.arange(T).double()), CHANGED),
    "without a mask": (attention(baddbmm, lambda s: s), CHANGED),
}


@pytest.mark.parametrize("name", ADDED)
def test_numbers_that_are_added_for_rows_and_heads_together(name):
    fn, expected = ADDED[name]
    assert_as_eager(lambda q, k, v: fn(q, k, v, alibi()), expected, tensors=inputs(2))


@pytest.mark.parametrize("eager", one_in(2, [True, False]), ids=["the graph", "compiled"])
@pytest.mark.parametrize("mask", [filled, HIDDEN, hidden(float("-inf"))], ids=["filled", "finite", "infinite"])
@pytest.mark.parametrize("shape", [(4, 1, T), (4, T, T), (4, T, 1), (1, T, T)], ids=str)
def test_they_get_their_gradient(shape, mask, eager):
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert_as_eager(attention(baddbmm, mask), LISTED, tensors=[*inputs(2), bias], eager=eager)


def test_rows_and_heads_that_are_told_apart_in_another_order_stay():
    def fn(query, key, value, bias):
        rows = [each.reshape(-1, T, 16) for each in (query, key, value)]
        scores = baddbmm(bias, rows[0], rows[1].mT).view(3, 2, T, T)
        token = torch.arange(T)
        scores = scores.masked_fill((token[:, None] < token).expand(3, 2, T, T), float("-inf"))
        return torch.bmm(F.softmax(scores, -1).view(-1, T, T), rows[2]).view(query.shape)

    bias = torch.randn(6, 1, T, dtype=torch.float64, requires_grad=True)
    assert_as_eager(fn, "rows and heads of its scores", tensors=[*inputs(2, 3, 3), bias])


def test_they_are_summed_with_the_mask_once_for_all_layers():
    def fn(query, key, value, bias, mask):
        for _ in range(3):
            query = attention(baddbmm, lambda scores: scores + mask)(query, key, value, bias)
        return query

    run, mask = specialized(fn), torch.where(causal(), 0.0, -1e30).double()
    run.call(*inputs(2), alibi(), mask)
    assert count(run.graph, torch.ops.glue.masked_attention.default) == 3
    assert count(run.graph, torch.ops.glue.mask_blocks.default) == 1
    assert count(run.graph, torch.add) == 1


@pytest.mark.slow
def test_any_number_of_rows():
    def fn(query, key, value, slopes):
        batch, _, length, size = query.shape
        heads = 2
        query, key, value = (each.view(batch, heads, length, size) for each in (query, key, value))
        rows = [each.reshape(batch * heads, length, size) for each in (query, key, value)]
        token = torch.arange(length)
        bias = (slopes[None, :, None] * token).expand(batch, -1, -1).reshape(batch * heads, 1, length)
        scores = torch.baddbmm(bias, rows[0], rows[1].mT, alpha=0.25).view(batch, heads, length, length)
        scores = scores + torch.where(token[:, None] >= token, 0.0, float("-inf")).double()
        weights = F.softmax(scores, -1).view(batch * heads, length, length)
        return torch.bmm(weights, rows[2]).view(batch, heads, length, size)

    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)
    run = specialized(fn, dynamic=True)
    for rows, length in ((3, 12), (5, 7)):
        assert_close(fn, run, [*inputs(rows, length=length), slopes])
    assert counts(run) == LISTED
    assert len(run.graphs) == 1
