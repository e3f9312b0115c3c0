"""Attention whose query, key and value are of several dtypes: no kernel takes those, unless autocast casts them."""

import pytest
import torch

from tests.passes.specialize_attention.attention import LENGTH, assert_as_eager, inputs


def mixed():
    """Query and key in fp64, value in fp32."""
    query, key, value = inputs()
    return [query, key, value.detach().float().requires_grad_()]


def weights(query, key):
    token = torch.arange(LENGTH)
    scores = query @ key.transpose(2, 3) * 0.25
    return scores.masked_fill(token[:, None] < token, -1e30).softmax(-1)


def weights_rounded_for_the_value(query, key, value):
    return weights(query, key).to(value.dtype) @ value


def value_widened_for_the_weights(query, key, value):
    return weights(query, key) @ value.double()


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (weights_rounded_for_the_value, r"several dtypes: torch\.float32, torch\.float64"),
        (value_widened_for_the_weights, {"causal": 1}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_parts_of_several_dtypes_are_left_alone(fn, expected):
    assert_as_eager(fn, expected, tensors=mixed())
