"""Gradients that an operator in the place of several would give otherwise, or could not give; beside near misses."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from glue_compiler.compat.attention import has_sdpa_backward
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

CAUSAL = {"causal": 1}
WRITTEN = "written in place later"


def causal():
    token = torch.arange(LENGTH)
    return token[:, None] >= token


def written_out(query, key, value):
    return (query @ key.transpose(2, 3) * 0.25).masked_fill(~causal(), float("-inf")).softmax(-1) @ value


def repeated(heads):
    return heads.repeat_interleave(2, 1)


# -- what backward reads is written after the attention


def negated(query, key, value):
    return written_out(query, key, value).neg_()


def part_written(query, key, value):
    out = written_out(query, key, value)
    out[:, 0, 1:] = 1
    return out


def written_unnoticed(query, key, value):
    out = written_out(query, key, value)
    result = out * 2
    out.data.zero_()
    return result


@torch._dynamo.allow_in_graph
def zeroed_in_secret(tensor):
    return tensor.data.zero_().sum()


def written_in_secret(query, key, value):
    out = written_out(query, key, value)
    result = out * 2
    return result, zeroed_in_secret(out)


def other_written_in_secret(query, key, value):
    """It may know of inputs, but not of what the graph has made."""
    out = written_out(query * 2, key * 2, value * 2)
    result = out * 2
    return result, zeroed_in_secret(result.detach().clone())


def sum_negated(query, key, value):
    return (written_out(query, key, value) + query).neg_()


def negated_in_the_middle(query, key, value):
    return written_out(query, key, value).clone().neg_() + key


def negated_without_gradients(query, key, value):
    with torch.no_grad():
        out = written_out(query, key, value).neg_()
    return out + query


def query_written(query, key, value):
    doubled = query * 2
    out = written_out(doubled, key.detach(), value)
    doubled.zero_()
    return out


def query_written_before(query, key, value):
    doubled = query * 2
    doubled.neg_()
    return written_out(doubled, key.detach(), value)


def value_written(query, key, value):
    doubled = value * 2
    out = written_out(query.detach(), key.detach(), doubled)
    doubled.zero_()
    return out


def key_written(query, key, value):
    doubled = key * 2
    out = written_out(query, repeated(doubled), repeated(value))
    doubled.zero_()
    return out


def mask_written(query, key, value):
    bias = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~causal(), float("-inf"))
    out = (query @ key.mT + bias).softmax(-1) @ value
    return out, bias.zero_()


def negated_after_its_region(query, key, value):
    return checkpoint(written_out, query, key, value, use_reentrant=False).neg_()


def negated_in_its_region(query, key, value):
    return checkpoint(negated, query, key, value, use_reentrant=False)


@pytest.mark.parametrize("eager", [True, False], ids=["the graph", "compiled"])
@pytest.mark.parametrize(
    ("fn", "expected"),
    one_in(
        3,
        [
            (negated, CAUSAL),
            (part_written, CAUSAL),
            (written_unnoticed, CAUSAL),
            (written_in_secret, WRITTEN),
            (other_written_in_secret, CAUSAL),
            (sum_negated, CAUSAL),
            (negated_in_the_middle, CAUSAL),
            (negated_without_gradients, CAUSAL),
            (query_written, WRITTEN),
            (query_written_before, CAUSAL),
            (value_written, WRITTEN),
            (key_written, WRITTEN),
            (mask_written, CAUSAL),
            (negated_after_its_region, CAUSAL),
            (negated_in_its_region, CAUSAL),
        ],
    ),
)
def test_what_backward_reads_is_not_written(fn, expected, eager):
    assert_as_eager(fn, expected, tensors=inputs(1, 4, 2 if fn is key_written else 4), eager=eager)


# -- what is written through an alias that no gradient flows through


def key_data_written(query, key, value):
    key.data.mul_(2)
    return written_out(query, key, value)


def value_detached_and_written(query, key, value):
    value.detach().mul_(2).add_(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=causal())


def key_written_between(query, key, value):
    key = key * 2
    first = written_out(query, key, value)
    key.data.add_(1)
    return first.detach() + written_out(query, key, value)


def key_written_in_a_view_of_no_grad(query, key, value):
    key = key * 1
    with torch.no_grad():
        key.view(key.shape).mul_(2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=causal())


def key_written_as_itself(query, key, value):
    key = key * 1
    key *= 2
    key.add_(1)
    return written_out(query, key, value)


def joined(left, right):
    """As multi-head latent attention puts its keys together in transformers: no ``cat``, but copies into the parts."""
    whole = left.new_empty(*left.shape[:-1], left.shape[-1] + right.shape[-1])
    whole[..., : left.shape[-1]].copy_(left)
    whole[..., left.shape[-1] :] = right
    return whole


def assembled(query, key, value):
    key = joined(key[..., :5], key[..., 5:] * 2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=causal())


def assembled_and_written_out(query, key, value):
    return written_out(joined(query[..., 7:], query[..., :7]), joined(key[..., :5], key[..., 5:]), value)


def assembled_inside(query, key, value):
    query, key, value = (each.detach() for each in (query, key, value))
    key = joined(key[..., :5], key[..., 5:])
    scores = query @ key.mT
    key[..., :5] = 0
    return scores.masked_fill(~causal(), -1e30).softmax(-1) @ value


def repeated_and_written(query, key, value):
    """A part of a repeated head is no repetition any more."""
    key = key[:, :2].repeat_interleave(2, dim=1)
    key[:, 1] = value[:, 1] * 3
    return F.scaled_dot_product_attention(query, key, value, attn_mask=causal())


@pytest.mark.parametrize("eager", [True, False], ids=["the graph", "compiled"])
@pytest.mark.parametrize(
    ("fn", "expected"),
    one_in(
        3,
        [
            (key_data_written, CAUSAL),
            (value_detached_and_written, CAUSAL),
            (key_written_between, CAUSAL),  # the second; backward of the first would read what was written
            (key_written_in_a_view_of_no_grad, CAUSAL),
            (key_written_as_itself, CAUSAL),
            (assembled, CAUSAL),
            (assembled_and_written_out, CAUSAL),
            (repeated_and_written, CAUSAL),
            (assembled_inside, "written in place inside of it"),
        ],
    ),
)
def test_gradients_go_to_what_was_read_and_not_to_what_wrote_it(fn, expected, eager):
    assert_as_eager(fn, expected, tensors=inputs(1, 4, 4), eager=eager)


# -- what is returned may be written before backward


def view_returned(query, key, value):
    return written_out(query, key, value).flatten(2)


def in_its_region(query, key, value):
    return checkpoint(written_out, query, key, value, use_reentrant=False)


def windowed(query, key, value):
    token = torch.arange(LENGTH)
    mask = causal() & (token[:, None] - token < 5)
    return (query @ key.mT).masked_fill(~mask, -1e30).softmax(-1) @ value


def windowed_view(query, key, value):
    return windowed(query, key, value).transpose(1, 2)


@pytest.mark.parametrize(
    ("fn", "write", "compiler"),
    [
        (written_out, "out += 1", "aot_eager"),
        (written_out, "out.detach().mul_(2)", "aot_eager"),
        (written_out, "out.data.zero_()", "aot_eager"),
        (written_out, "out.data.zero_()", "inductor"),
        (view_returned, "out += 1", "aot_eager"),
        (in_its_region, "out += 1", "aot_eager"),
        (windowed, "out += 1", "aot_eager"),
        (windowed_view, "out.data.mul_(2)", "aot_eager"),
    ],
)
def test_a_caller_may_write_the_result_before_backward(fn, write, compiler):
    def gradients(call):
        tensors = inputs()
        out = call(*tensors)
        exec(write, {"out": out})
        out.pow(2).sum().backward()
        return [tensor.grad for tensor in tensors]

    torch.manual_seed(0)
    expected = gradients(fn)
    torch.manual_seed(0)
    run = specialized(fn, eager=False, compiler=compiler)
    torch.testing.assert_close(gradients(run.call), expected)
    assert sum(counts(run).values()) == (compiler != "inductor" or has_sdpa_backward(torch.empty(0).double()))


@pytest.mark.parametrize(("fn", "copies"), [(written_out, 1), (sum_negated, 0)])
def test_only_a_result_that_is_returned_is_copied(fn, copies):
    run = specialized(fn)
    run.call(*inputs())
    assert counts(run) == CAUSAL
    assert count(run.graph, torch.ops.glue.private_copy.default) == copies


@pytest.mark.parametrize("fn", [written_out, windowed])
def test_a_checkpoint_around_the_first_call_counts_what_forward_saves(fn):
    run = specialized(fn, eager=False)
    torch.manual_seed(0)
    tensors = inputs()
    expected = run_as(fn, tensors, ())
    found = run_as(lambda *given: checkpoint(run.call, *given, use_reentrant=False), tensors, ())
    torch.testing.assert_close(found, expected)
    assert sum(counts(run).values()) == 1


# -- gradients end at what is made without them


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_key_transposed_without_gradients_gets_none(with_gradients):
    def fn(query, key, value):
        with torch.set_grad_enabled(with_gradients):
            transposed = key.mT
        return (query @ transposed * 0.25).masked_fill(~causal(), -1e30).softmax(-1) @ value

    assert_as_eager(fn, CAUSAL if with_gradients else "gradients are switched off")


@pytest.mark.parametrize("without", ["view", "expand", "reshape", "detach", "nothing"])
@pytest.mark.parametrize("of", ["key", "value"])
def test_a_head_repeated_without_gradients_gets_none(without, of):
    def step(name, make):
        with torch.set_grad_enabled(without != name):
            return make()

    def shared(heads):
        heads = heads.detach() if without == "detach" else heads
        one = step("view", lambda: heads[:, :, None])
        many = step("expand", lambda: one.expand(-1, -1, 2, -1, -1))
        return step("reshape", lambda: many.reshape(1, 4, LENGTH, 16))

    def fn(query, key, value):
        key = shared(key) if of == "key" else repeated(key)
        value = shared(value) if of == "value" else repeated(value)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=causal())

    assert_as_eager(fn, CAUSAL, tensors=inputs(1, 4, 2))


def test_heads_repeated_without_gradients_need_none():
    """Nothing needs a gradient then, but what was repeated does."""

    def fn(query, key, value):
        with torch.no_grad():
            key, value = repeated(key), repeated(value)
        return F.scaled_dot_product_attention(query.detach(), key, value, attn_mask=causal()), query + 1

    assert_as_eager(fn, CAUSAL, tensors=inputs(1, 4, 2))


def test_views_without_gradients_in_an_attention_without_any():
    def fn(query, key, value):
        with torch.no_grad():
            return written_out(query, repeated(key), repeated(value)), query + key.sum() + value.sum()

    assert_as_eager(fn, CAUSAL, tensors=inputs(1, 4, 2))


@pytest.mark.parametrize("eager", [True, False], ids=["the graph", "compiled"])
def test_views_before_and_after_a_region_without_gradients(eager):
    """What Dynamo writes after such a region switches gradients on, which they were before it."""

    def fn(query, key, value):
        key, transposed = repeated(key), repeated(key).transpose(2, 3)
        with torch.no_grad():
            mask = ~causal()
        return (query @ transposed).masked_fill(mask, -1e30).softmax(-1) @ repeated(value) + key

    assert_as_eager(fn, CAUSAL, tensors=inputs(1, 4, 2), eager=eager)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_graph_called_without_gradients(mode):
    def fn(query, key, value):
        return written_out(query, repeated(key), repeated(value))

    def called(query, key, value):
        with mode():
            return run.call(query, key, value)

    run, tensors = specialized(fn), inputs(1, 4, 2)
    torch.testing.assert_close(called(*tensors), fn(*tensors).detach(), rtol=1e-10, atol=1e-10)
    assert counts(run) == CAUSAL


# -- gradients whose strides are seen


class Flattened(torch.autograd.Function):
    """Takes a view of its gradient, as backwards of fused norms do; the numbers depend on their order."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        flat = gradient.view(-1)
        return (flat * torch.arange(flat.numel())).view(gradient.shape)


@torch.library.custom_op("glue_tests::same", mutates_args=())
def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


same.register_fake(torch.empty_like)
same.register_autograd(lambda ctx, gradient: gradient.view(-1).view(gradient.shape))


def behind_a_function(query, key, value):
    return written_out(Flattened.apply(query) * 2, key, value)


def behind_a_custom_operator(query, key, value):
    return written_out(query, key, torch.ops.glue_tests.same(value))


def behind_a_hook(query, key, value):
    query = query * 1
    query.register_hook(lambda gradient: gradient.view(-1).view(gradient.shape) * 2)
    return written_out(query, key, value)


def in_a_region_behind_a_function(query, key, value):
    return checkpoint(written_out, Flattened.apply(query), key, value, use_reentrant=False)


def behind_a_region_with_a_function(query, key, value):
    return written_out(checkpoint(Flattened.apply, query, use_reentrant=False), key, value)


def a_product_is_between(query, key, value):
    identity = torch.eye(16, dtype=query.dtype)
    return written_out(Flattened.apply(query) @ identity, key, value)


def a_function_after_it(query, key, value):
    return Flattened.apply(written_out(query, key, value))


def a_function_without_gradients(query, key, value):
    return written_out(query + Flattened.apply(value.detach()), key, value)


SEEN = "may depend on their strides"


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (behind_a_function, SEEN),
        (behind_a_custom_operator, SEEN),
        (behind_a_hook, SEEN),
        (in_a_region_behind_a_function, SEEN),
        (behind_a_region_with_a_function, SEEN),
        (a_product_is_between, CAUSAL),
        (a_function_after_it, CAUSAL),
        (a_function_without_gradients, CAUSAL),
    ],
)
def test_strides_of_gradients_that_are_seen_stay(fn, expected):
    assert_as_eager(fn, expected, eager=False)
