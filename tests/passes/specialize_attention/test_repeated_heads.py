"""Key and value heads that are repeated, and what is left of a repeat: each against eager in fp64."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import assert_as_eager, inputs, specialized
from tests.passes.specialize_attention.test_what_operators_do import CAUSAL, T, causal, sdpa


def test_repeated_heads_of_a_longer_cache():
    def fn(query, key, value):
        key, value = (heads.repeat_interleave(2, 1)[:, :, :T] for heads in (key, value))
        return sdpa(query, key, value, causal())

    query, _, _ = inputs(1, 4, 2)
    _, key, value = inputs(1, 4, 2, length=T + 3)
    assert_as_eager(fn, CAUSAL, tensors=[query, key, value])


def test_repeated_heads_of_a_batch_that_is_expanded():
    def fn(query, key, value):
        key, value = (heads[:1].repeat_interleave(2, 1).expand(2, -1, -1, -1) for heads in (key, value))
        return sdpa(query, key, value, causal())

    assert_as_eager(fn, CAUSAL, tensors=inputs(2, 4, 2))


def regrouped(heads):
    """Of a row, the heads of which the first half is the first head repeated."""
    return heads[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)


UNDONE = {
    "sliced": (lambda heads: heads.repeat_interleave(2, 1)[:, :2], 2),
    "sliced from the middle": (lambda heads: heads.repeat_interleave(2, 1)[:, 1:3], 2),
    "narrowed": (lambda heads: heads.repeat_interleave(2, 1).narrow(1, 2, 2), 2),
    "every second": (lambda heads: heads.repeat_interleave(2, 1)[:, ::2], 2),
    "expanded and sliced": (lambda heads: regrouped(heads)[:, :2], 2),
    "tiled and sliced": (lambda heads: heads.repeat(1, 2, 1, 1)[:, 1:3], 2),
    "tiled": (lambda heads: heads.repeat(1, 2, 1, 1), 4),
    "flipped": (lambda heads: heads.repeat_interleave(2, 1).flip(1), 4),
    "picked": (lambda heads: heads.repeat_interleave(2, 1)[:, torch.tensor([0, 2, 1, 3])], 4),
    "of other rows": (lambda heads: heads.repeat_interleave(2, 1).transpose(0, 1).reshape(2, 4, T, 16), 4),
    "of heads and tokens": (lambda heads: heads.transpose(1, 2).reshape(2, 2, T, 16).repeat_interleave(2, 1), 2),
    "of the first head": (lambda heads: heads[:, :1].repeat_interleave(2, 1), 1),
    "whole": (lambda heads: heads.repeat_interleave(2, 1), 2),
    "twice": (lambda heads: regrouped(regrouped(heads[:, :1])), 2),
}


@pytest.mark.parametrize("name", UNDONE)
def test_heads_are_grouped_by_what_is_left_of_a_repeat(name):
    change, key_heads = UNDONE[name]

    def fn(query, key, value):
        return F.scaled_dot_product_attention(query, change(key), change(value), causal(), enable_gqa=True)

    tensors = inputs(2, 4, 2)
    assert_as_eager(fn, CAUSAL, tensors=tensors)
    run = specialized(fn)
    run.call(*tensors)
    (call,) = (n for n in run.graph.graph.nodes if n.target is torch.ops.glue.causal_attention.default)
    assert [arg.meta["example_value"].shape[1] for arg in call.args[1:3]] == [key_heads] * 2


@pytest.mark.parametrize("with_gradients", [False, True])
def test_heads_repeated_without_gradients_are_not_grouped(with_gradients):
    def fn(query, key, value):
        with torch.set_grad_enabled(with_gradients):
            key = key.repeat_interleave(2, 1)
        return sdpa(query, key, value.repeat_interleave(2, 1), causal())

    assert_as_eager(fn, CAUSAL, tensors=inputs(1, 4, 2))


@pytest.mark.parametrize("repeated", [False, True])
def test_heads_stay_repeated_where_no_kernel_of_sdpa_takes_fewer(repeated, monkeypatch):
    """As in fp32 on a GPU, where all scores would be in memory then. What the program does not repeat stays grouped."""
    monkeypatch.setattr("glue_compiler.passes.specialize_attention.rewrite.sdpa_shares_heads", lambda call: False)

    def fn(query, key, value):
        if repeated:
            return sdpa(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), causal())
        return F.scaled_dot_product_attention(query, key, value, causal(), enable_gqa=True)

    tensors = inputs(2, 4, 2)
    assert_as_eager(fn, CAUSAL, tensors=tensors)
    run = specialized(fn)
    run.call(*tensors)
    (call,) = (n for n in run.graph.graph.nodes if n.target is torch.ops.glue.causal_attention.default)
    assert [arg.meta["example_value"].shape[1] for arg in call.args[1:3]] == [4 if repeated else 2] * 2


def test_dropped_heads_stay_repeated_too(monkeypatch):
    monkeypatch.setattr("glue_compiler.passes.specialize_attention.rewrite.sdpa_shares_heads", lambda call: False)

    def fn(query, key, value):
        key, value = (heads.repeat_interleave(2, 1) for heads in (key, value))
        return F.scaled_dot_product_attention(query, key, value, causal(), dropout_p=0.5)

    run = specialized(fn)
    run.call(*inputs(2, 4, 2))
    (call,) = (n for n in run.graph.graph.nodes if n.target is F.scaled_dot_product_attention)
    assert call.kwargs["is_causal"]
    assert not call.kwargs["enable_gqa"]
