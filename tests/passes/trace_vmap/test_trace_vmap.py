"""Code under torch.vmap becomes plain operators, with the same bits; what cannot be is left alone with its reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.captured import compile_with_glue

ALONE = {"trace_vmap": True}
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]])


def masked(shows, x, positions):
    """As transformers 4 makes masks: ``shows(documents, batch, query, key)`` for each of a row."""
    documents = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1)

    def one(batch, query, key):
        return shows(documents, batch, query, key)

    for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
        one = torch.vmap(one, in_dims=dims, out_dims=0)
    tokens = torch.arange(x.shape[1])
    mask = one(torch.arange(x.shape[0]), tokens, tokens)[:, None]
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)


def packed(x, positions):
    return masked(
        lambda documents, batch, query, key: (
            (key <= query)
            & (torch.ops.aten.index(documents, [batch, query]) == torch.ops.aten.index(documents, [batch, key]))
        ),
        x,
        positions,
    )


def causal(x, positions):
    return masked(lambda documents, batch, query, key: key <= query, x, positions)


def counts(run, name):
    return [dict(p.counts) for graph in run.session.graphs for p in graph.passes if p.name == name]


@pytest.mark.parametrize(("fn", "form"), [(packed, "packed"), (causal, "causal")])
def test_masks_are_read(fn, form):
    run = compile_with_glue(fn, passes={"trace_vmap": True, "specialize_attention": True}, eager=True)
    for length in (12, 8, 10):  # the second compile is for all lengths
        x = torch.randn(1, length, 8, dtype=torch.float64, requires_grad=True)
        positions = POSITIONS[:, :length]
        actual, expected = run.call(x, positions), fn(x, positions)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(each.square().sum(), x)[0] for each in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert counts(run, "trace_vmap") == [{"traced": 1}] * 2
    assert all(form in each for each in counts(run, "specialize_attention"))


def outer_sums(x, y):
    return torch.vmap(lambda a: torch.vmap(lambda b: (a * b).sum() + b.sin().max())(y))(x), torch.vmap(torch.sort)(x)


@pytest.mark.parametrize("sizes", [(3, 4, 5), (1, 1, 5), (2, 1, 1)], ids=str)
def test_results_have_the_same_bits(sizes):
    n, m, width = sizes
    run = compile_with_glue(outer_sums, passes=ALONE)
    x, y = torch.randn(n, width), torch.randn(m, width)
    torch.testing.assert_close(run.call(x, y), outer_sums(x, y), rtol=0, atol=0)
    assert counts(run, "trace_vmap") == [{"traced": 2}]


def draws(x):
    return torch.vmap(lambda row: row + torch.rand_like(row), randomness="different")(x)


def writes(x):
    return torch.vmap(lambda row: row.clone().add_(1))(x)


def differentiates(x):
    return torch.vmap(torch.func.grad(lambda row: row.square().sum()))(x)


def needs_a_gradient(x):
    return torch.vmap(torch.sin)(x)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (draws, "draws random numbers"),
        (writes, "writes memory"),
        (differentiates, "another transform"),
        (needs_a_gradient, "needs a gradient"),
    ],
)
def test_what_is_left_alone(fn, reason):
    run = compile_with_glue(fn, passes=ALONE)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=fn is needs_a_gradient)
    torch.manual_seed(0)
    actual = run.call(x)
    torch.manual_seed(0)
    torch.testing.assert_close(actual, fn(x))
    skips = [s.reason for graph in run.session.graphs for p in graph.passes if p.name == "trace_vmap" for s in p.skips]
    assert [reason in each for each in skips] == [True]
    torch.vmap(torch.sin)(x)  # no level is left open
