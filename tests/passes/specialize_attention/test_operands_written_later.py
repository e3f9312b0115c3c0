"""Keys and values that were copied for the attention, and that their caller writes before backward."""

import pytest
import torch
import torch.nn.functional as F

from tests.captured import count
from tests.passes.specialize_attention.attention import LENGTH, counts, inputs, specialized


def causal():
    token = torch.arange(LENGTH)
    return token[:, None] >= token


def repeated(heads):
    return heads[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, LENGTH, 16)


def of_repeated_heads(query, key, value):
    return F.scaled_dot_product_attention(query, repeated(key), repeated(value), attn_mask=causal())


def written_out(query, key, value):
    scores = query @ repeated(key).transpose(2, 3) * 0.25
    return scores.masked_fill(~causal(), -1e30).softmax(-1) @ repeated(value)


def of_a_transposed_copy(query, key, value):
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3).contiguous()
    return scores.masked_fill(~causal(), -1e30).softmax(-1) @ repeated(value)


def windowed(query, key, value):
    token = torch.arange(LENGTH)
    mask = causal() & (token[:, None] - token < 5)
    return F.scaled_dot_product_attention(query, repeated(key), repeated(value), attn_mask=mask)


def returned(query, key, value):
    key, value = key * 2, value * 2
    return of_repeated_heads(query, key, value), key, value


def of_its_own(query, key, value):
    return of_repeated_heads(query, key * 2, value * 2)


def multiplied(tensor):
    tensor.mul_(3)


def multiplied_out_of_sight(tensor):
    tensor.data.mul_(3)


def gradients(fn, write):
    torch.manual_seed(0)
    leaves = inputs(1, 4, 2)
    given = [leaf * 1 for leaf in leaves]  # not leaves, which no one may write
    out = fn(*given)
    out, *written = out if isinstance(out, tuple) else (out, *given[1:])
    for tensor in written:
        write(tensor)
    out.pow(2).sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("write", [multiplied, multiplied_out_of_sight])
@pytest.mark.parametrize("fn", [of_repeated_heads, written_out, of_a_transposed_copy, windowed, returned])
def test_keys_and_values_that_were_copied_may_be_written_before_backward(fn, write):
    run = specialized(fn, eager=False)
    torch.testing.assert_close(gradients(run.call, write), gradients(fn, write))
    assert sum(counts(run).values()) == 1


@pytest.mark.parametrize(("fn", "copies"), [(of_repeated_heads, 2), (returned, 2), (of_its_own, 0)])
def test_only_those_that_others_know_are_copied(fn, copies):
    run = specialized(fn)
    run.call(*inputs(1, 4, 2))
    assert counts(run) == {"causal": 1}
    assert count(run.graph, torch.ops.glue.private_copy.default) == copies


def test_none_is_copied_without_gradients():
    run = specialized(of_repeated_heads)
    run.call(*(tensor.detach() for tensor in inputs(1, 4, 2)))
    assert counts(run) == {"causal": 1}
    assert count(run.graph, torch.ops.glue.private_copy.default) == 0
