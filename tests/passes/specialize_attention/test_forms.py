"""What takes an attention's place, and in which forms attention is found; against eager in fp64."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue
from tests.captured import compile_and_keep, count, result_and_gradients
from tests.passes.specialize_attention.attention import (
    LENGTH,
    POSITIONS,
    assert_as_eager,
    assert_close,
    counts,
    inputs,
    specialized,
    square_tensors,
)
from tests.slow import one_in

T = LENGTH
STARTS = POSITIONS == 0
packed_attention = torch.ops.glue.packed_attention.default


def causal():
    token = torch.arange(T)
    return token[:, None] >= token


def documents(starts):
    ids = starts.cumsum(-1)
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal()


def repeated(heads, times):
    batch, key_heads, length, size = heads.shape
    wider = heads[:, :, None].expand(batch, key_heads, times, length, size)
    return wider.reshape(batch, key_heads * times, length, size)


@pytest.mark.parametrize("make_mask", [documents, lambda starts: causal()], ids=["packed", "causal"])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("spelling", ["expand", "repeat_interleave", "enable_gqa"])
def test_repeated_heads_are_grouped(make_mask, key_heads, spelling):
    def fn(query, key, value, starts):
        times = 4 // key_heads
        if spelling == "expand":
            key, value = repeated(key, times), repeated(value, times)
        elif spelling == "repeat_interleave":
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        mask = make_mask(starts)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=0.3, enable_gqa=spelling == "enable_gqa"
        )

    run = specialized(fn)
    assert_close(fn, run, inputs(2, 4, key_heads), STARTS)
    assert sum(counts(run).values()) == 1
    (call,) = (
        n for n in run.graph.graph.nodes if n.target in (packed_attention, torch.ops.glue.causal_attention.default)
    )
    assert call.args[1].meta["example_value"].shape[1] == key_heads


@pytest.mark.parametrize("spelling", one_in(2, ["documents", "by values", "written out", "transposed"]))
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("sizes", [(16, 10), (6, 16)], ids=["narrow values", "wide values"])
def test_values_may_have_another_size_than_keys(spelling, scale, sizes):
    """Multi-head latent attention: heads of keys hold a part that is rotated, which values do not have."""

    def fn(query, key, value, starts):
        key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
        mask = documents(starts)
        if spelling == "by values":
            mask = mask | (starts[:, None, None] & torch.tensor([[[[True]], [[False]]] * 2]))
        if spelling == "written out":
            factor = scale or sizes[0] ** -0.5
            return (query @ key.mT * factor).masked_fill(~mask, float("-inf")).softmax(-1) @ value
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).flatten(2) if spelling == "transposed" else out

    size, of_value = sizes
    tensors = [torch.randn(2, h, T, s, dtype=torch.float64) for h, s in ((4, size), (2, size), (2, of_value))]
    run = specialized(fn)
    assert_close(fn, run, [tensor.requires_grad_() for tensor in tensors], torch.cat([STARTS, STARTS.roll(3, 1)]))
    assert counts(run) == {"listed" if spelling == "by values" else "packed": 1}


@pytest.mark.parametrize("mask", ["added", "masked_fill", None])
def test_one_head_of_keys_is_broadcast_to_all_queries(mask):
    """Multi-query attention: neither a product nor sdpa needs it repeated."""

    def fn(query, key, value, starts):
        if mask is not None:
            return written_out(query, key, value, starts, mask=mask)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=documents(starts))

    run = specialized(fn)
    assert_close(fn, run, inputs(1, 4, 1), STARTS)
    assert counts(run) == {"packed": 1}


def test_one_head_of_keys_and_several_of_values_stay():
    def fn(query, key, value, starts):
        return written_out(query, key[:, :1], value, starts)

    run = specialized(fn)
    assert_close(fn, run, inputs(1, 4, 4), STARTS)
    assert counts(run) == {}


def test_heads_in_another_order_are_not_grouped():
    def fn(query, key, value, starts):
        return F.scaled_dot_product_attention(
            query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1), attn_mask=documents(starts)
        )

    run = specialized(fn)
    assert_close(fn, run, inputs(1, 4, 2), STARTS)
    (call,) = (n for n in run.graph.graph.nodes if n.target is packed_attention)
    assert call.args[1].meta["example_value"].shape[1] == 4


def written_out(query, key, value, starts, *, mask="added", scale=0.25, dropout=0.0):
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    visible = documents(starts)
    if mask == "added":
        scores = scores + torch.where(visible, torch.zeros((), dtype=scores.dtype), torch.finfo(scores.dtype).min)
    elif mask == "masked_fill":
        scores = scores.masked_fill(~visible, float("-inf"))
    elif mask == "where":
        scores = torch.where(visible, scores, -1e30)
    weights = F.softmax(scores, dim=-1).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=True)
    return torch.matmul(weights, value)


@pytest.mark.parametrize("mask", ["added", "masked_fill", "where"])
def test_softmax_between_two_products_is_attention(mask):
    def fn(*tensors):
        return written_out(*tensors, mask=mask)

    run = specialized(fn)
    assert_close(fn, run, inputs(), STARTS)
    assert counts(run) == {"packed": 1}
    assert square_tensors(run) == []
    assert count(run.graph, torch.matmul) == 0


def test_softmax_without_a_mask_is_attention():
    def fn(*tensors):
        return written_out(*tensors, STARTS, mask=None)

    run = specialized(fn)
    assert_close(fn, run, inputs())
    assert counts(run) == {"unmasked": 1}


def weights_returned(query, key, value):
    weights = F.softmax(query @ key.transpose(2, 3) + torch.where(causal(), 0.0, -1e30).double(), dim=-1)
    return weights @ value, weights


def key_written_later(query, key, value):
    query, key = query.detach(), key.detach() * 2
    scores = query @ key.transpose(2, 3) + torch.where(causal(), 0.0, -1e30).double()
    key.zero_()
    return F.softmax(scores, dim=-1) @ value


def other_dimension(query, key, value):
    return F.softmax(query @ key.transpose(2, 3) + torch.where(causal(), 0.0, -1e30).double(), dim=2) @ value


def keys_cut_off_from_a_part(query, key, value):
    turned = key.reshape(1, 2, 16, T) * 2
    with torch.no_grad():
        scores = query @ turned
    return F.softmax(scores + turned.sum() * 0, dim=-1) @ value


def made_transposed(key):
    """As squeezebert's: ``[B, H, D, T]`` of no tensor ``[B, H, T, D]``."""
    return key.reshape(1, 2, 16, T) * 2


def some_keys():
    return torch.rand(1, 1, T, T, generator=torch.Generator().manual_seed(0)) < 0.7


@pytest.mark.parametrize("eager", [True, False], ids=["the graph", "compiled"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda scores, mask: scores, {"unmasked": 1}),
        (lambda scores, mask: scores.masked_fill(~causal(), -1e30), {"causal": 1}),
        (lambda scores, mask: scores.masked_fill(~mask, -1e30), {"listed": 1}),
        (lambda scores, mask: scores + torch.zeros(T, T).double().expand_as(scores), {"unmasked": 1}),
    ],
)
def test_keys_that_are_made_transposed(change, expected, eager):
    def fn(query, key, value, mask):
        return F.softmax(change(query @ made_transposed(key) * 0.25, mask), -1) @ value

    assert_as_eager(fn, expected, [some_keys()], eager=eager)


@pytest.mark.parametrize("queries", [1, 5])
def test_softmax_without_a_mask_for_another_number_of_keys(queries):
    def fn(query, key, value):
        return F.softmax(query[:, :, :queries] @ key.transpose(2, 3) * 0.25, -1) @ value

    assert_as_eager(fn, {"unmasked": 1})


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (weights_returned, "used elsewhere"),
        (key_written_later, "written in place"),
        (other_dimension, "two products that are not of query"),
        (keys_cut_off_from_a_part, "gradients are switched off"),
    ],
)
def test_other_softmax_stays(fn, reason):
    run = specialized(fn)
    tensors = inputs()
    for want, got in zip(result_and_gradients(fn, tensors), result_and_gradients(run.call, tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert counts(run) == {}
    (skip,) = run.report.passes[0].skips
    assert re.search(reason, skip.reason)


def test_dropout_keeps_the_mask_of_documents_and_drops_a_causal_one():
    def packed(query, key, value, starts):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=documents(starts), dropout_p=0.5)

    def plain(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=causal(), dropout_p=0.5)

    run = specialized(packed)
    run.call(*inputs(), STARTS)
    assert counts(run) == {}
    assert "dropout" in run.report.passes[0].skips[0].reason
    torch._dynamo.reset()
    run = specialized(plain)
    run.call(*inputs())
    assert counts(run) == {"causal": 1}
    (call,) = run.graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert call.kwargs["dropout_p"] == 0.5
    assert call.kwargs["is_causal"]


def test_two_attentions_share_the_metadata():
    def fn(query, key, value, starts):
        mask = documents(starts)
        once = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return F.scaled_dot_product_attention(once, key, value, attn_mask=mask)

    run = specialized(fn)
    assert_close(fn, run, inputs(), STARTS)
    assert counts(run) == {"packed": 2}
    assert count(run.graph, torch.ops.glue.document_offsets.default) == 1


def test_two_paddings_have_metadata_of_their_own():
    def fn(query, key, value, first, second):
        once = F.scaled_dot_product_attention(query, key, value, attn_mask=causal() & first[:, None, None])
        return F.scaled_dot_product_attention(once, key, value, attn_mask=causal() & second[:, None, None])

    run = specialized(fn)
    assert_close(fn, run, inputs(), STARTS, ~STARTS)
    assert counts(run) == {"packed": 2}
    assert count(run.graph, torch.ops.glue.document_blocks.default) == 2


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_padding_of_checkpoint_bodies(where):
    def layer(query, key, value, given):
        mask = given if where == "outside" else causal() & given[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def fn(query, key, value, valid):
        given = causal() & valid[:, None, None] if where == "outside" else valid
        query = checkpoint(layer, query, key, value, given, use_reentrant=False)
        return checkpoint(layer, query, key, value, given, use_reentrant=False)

    run = specialized(fn, eager=False)
    assert_close(fn, run, inputs(), ~STARTS)
    assert counts(run) == {"packed": 2}
    assert square_tensors(run) == []
    assert count(run.graph, torch.ops.glue.document_blocks.default) == 1


def test_a_mask_that_is_used_elsewhere_stays_there():
    def fn(query, key, value, starts):
        mask = documents(starts)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return out, mask

    run = specialized(fn)
    tensors = inputs()
    torch.testing.assert_close(run.call(*tensors, STARTS), fn(*tensors, STARTS))
    assert counts(run) == {"packed": 1}


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_checkpoint_bodies_take_offsets_for_the_mask(where):
    def layer(query, key, value, mask_or_starts):
        mask = mask_or_starts if where == "outside" else documents(mask_or_starts)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def fn(query, key, value, starts):
        given = documents(starts) if where == "outside" else starts
        query = checkpoint(layer, query, key, value, given, use_reentrant=False)
        return checkpoint(layer, query, key, value, given, use_reentrant=False)

    run = specialized(fn, eager=False)
    assert_close(fn, run, inputs(), STARTS)
    assert counts(run) == {"packed": 2}
    assert square_tensors(run) == []
    assert count(run.graph, torch.ops.glue.document_offsets.default) == (1 if where == "outside" else 2)


def test_a_body_before_an_attention_of_the_caller():
    def layer(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def fn(query, key, value, starts):
        mask = documents(starts)
        query = checkpoint(layer, query, key, value, mask, use_reentrant=False)
        return layer(query, key, value, mask)

    run = specialized(fn, eager=False)
    assert_close(fn, run, inputs(), STARTS)
    assert counts(run) == {"packed": 2}
    assert count(run.graph, torch.ops.glue.document_offsets.default) == 1


def test_views_of_the_result_keep_their_strides():
    def fn(query, key, value, starts):
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=documents(starts))
        return out.view(-1, out.shape[-1])

    run = specialized(fn, eager=False)
    assert_close(fn, run, inputs(), STARTS)
    assert counts(run) == {"packed": 1}


def test_autocast_decides_the_dtype():
    def fn(query, key, value, starts):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=documents(starts))

    run = specialized(fn, eager=False)
    tensors = [tensor.detach().float().requires_grad_() for tensor in inputs()]
    expected = result_and_gradients(lambda *t: fn(*t, STARTS), tensors)
    actual = result_and_gradients(lambda *t: run.call(*t, STARTS), tensors)
    assert counts(run) == {"packed": 1}
    for want, got in zip(expected, actual, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("make_mask", [documents, lambda starts: causal()], ids=["packed", "causal"])
def test_unknown_numbers_of_grouped_heads_keep_the_mask(make_mask):
    def fn(query, key, value, starts):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=make_mask(starts), enable_gqa=True)

    run = specialized(fn, dynamic=True)
    tensors = inputs(2, 4, 2)
    torch.testing.assert_close(run.call(*tensors, STARTS), fn(*tensors, STARTS))
    assert counts(run) == {}
    assert "how many query heads" in run.report.passes[0].skips[0].reason


@pytest.mark.parametrize("make_mask", [documents, lambda starts: causal()], ids=["packed", "causal"])
def test_unknown_numbers_of_equal_heads_do_not_matter(make_mask):
    def fn(query, key, value, starts):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=make_mask(starts))

    run = specialized(fn, dynamic=True)
    for heads in (2, 3):
        assert_close(fn, run, inputs(5, heads, heads), STARTS)
    assert sum(counts(run).values()) == 1
    assert len(run.graphs) == 1


def test_on_by_default():
    def fn(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=causal())

    run = compile_and_keep(fn, eager=True)
    run.call(*inputs())
    assert counts(run) == {"causal": 1}
