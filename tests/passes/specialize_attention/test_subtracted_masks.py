"""Masks that are subtracted from the scores, and named dimensions of products: each beside its near miss."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import LENGTH, assert_as_eager, inputs

CHANGED = "changed in another way than by a scale"


def hidden():
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def attention(change):
    def fn(query, key, value, *others):
        return F.softmax(change(query @ key.mT * 0.25, *others), dim=-1) @ value

    return fn


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s - hidden().double() * 1e30, {"causal": 1}),
        (lambda s: (s - hidden().double() * 1e30) * 0.5, {"causal": 1}),
        (lambda s: torch.sub(s, hidden().double(), alpha=1e30), CHANGED),
        (lambda s: hidden().double() * 1e30 - s, CHANGED),
        (lambda s: s.sub_(hidden().double() * 1e30), {"causal": 1}),
        (lambda s: s - hidden().double() * 3, {"listed": 1}),
    ],
)
def test_a_mask_is_subtracted(change, expected):
    assert_as_eager(attention(change), expected)


def test_a_bias_that_is_subtracted_gets_its_gradient():
    bias = torch.randn(1, 2, LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)
    assert_as_eager(attention(lambda s, bias: s - bias), {"listed": 1}, tensors=[*inputs(), bias])


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ("...qd,...kd->...qk", {"causal": 1}),
        ("a...qd,a...kd->a...qk", {"causal": 1}),
        ("...qd,bhkd->bhqk", CHANGED),
        ("...qd,...kd->...kq", {"causal": 1}),  # the key is the query here, and the other way round
        ("...dq,...dk->...qk", CHANGED),
    ],
)
def test_dimensions_of_an_ellipsis_have_names(scores, expected):
    def fn(query, key, value):
        if scores.startswith("...dq"):
            query, key = query.mT, key.mT
        weights = torch.einsum(scores, query, key).masked_fill(hidden(), float("-inf")).softmax(-1)
        return torch.einsum("...qk,...kd->...qd", weights, value)

    assert_as_eager(fn, expected)
