"""Softmax between two products whose rows and heads are one dimension, beside near misses; against eager in fp64."""

import pytest
import torch
import torch.nn.functional as F

from tests.captured import result_and_gradients
from tests.passes.specialize_attention.attention import (
    POSITIONS,
    assert_as_eager,
    assert_close,
    counts,
    inputs,
    specialized,
)
from tests.passes.specialize_attention.merged_heads import (
    CAUSAL,
    CHANGED,
    LISTED,
    LOWEST,
    PACKED,
    UNMASKED,
    UNREAD,
    B,
    H,
    T,
    added,
    between,
    causal,
    merged,
    merged_otherwise,
    on_heads,
    product,
    unchanged,
    with_mask,
)
from tests.slow import one_in

STARTS = torch.cat([POSITIONS, POSITIONS.roll(3, 1)]) == 0
KEYS = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(0)) < 0.5
KEYS_OF_HEADS = torch.rand(B, H, T, T, generator=torch.Generator().manual_seed(0)) < 0.5


def documents(starts=STARTS):
    ids = starts.cumsum(-1)
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal()


def merged_behind_tokens(tensor):
    """As fsmt of transformers makes its query, of which no tensor ``[B, H, T, D]`` is there."""
    rows, heads, length, size = tensor.shape
    tokens = tensor.permute(2, 0, 1, 3).flatten(2).contiguous()
    return tokens.view(length, rows * heads, size).transpose(0, 1)


def repeated(key):
    return key[:, :, None].expand(B, 1, H, T, 16).reshape(B, H, T, 16)


def filled(visible, low=LOWEST):
    return lambda scores: scores.masked_fill(~visible(), low)


def floored(low=LOWEST, mask=lambda: added(causal())):
    return on_heads(lambda s: torch.max(s + mask(), torch.full((), low, dtype=s.dtype)))


READ = {
    "negated": (between(end=lambda out: out.neg_()), CAUSAL),
    "a view of it is written": (between(end=lambda out: (out.view(B, H, T, -1)[:, 0].zero_(), out)[1]), CAUSAL),
    "a mask that is added": (between(), CAUSAL),
    "documents that are filled in": (between(on_heads(filled(documents))), PACKED),
    "documents that are chosen": (between(on_heads(lambda s: torch.where(documents(), s, -1e30))), PACKED),
    "a mask that is read": (between(on_heads(lambda s: s + added(KEYS, -1e30))), LISTED),
    "a mask of each head": (between(on_heads(filled(lambda: KEYS_OF_HEADS))), LISTED),
    "a mask of each head for all rows, first": (
        between(on_heads(lambda s: torch.zeros(H, T, T).double().masked_fill(~KEYS_OF_HEADS[0], -1e30) + s)),
        LISTED,
    ),
    "two masks": (
        between(lambda s: on_heads(filled(documents))(on_heads(lambda s: s.masked_fill(~causal(), -1e30))(s))),
        PACKED,
    ),
    "numbers that are added, and a mask": (
        between(
            lambda s: on_heads(filled(lambda: KEYS, low=float("-inf")))(
                on_heads(lambda s: s + torch.arange(H)[:, None, None].double() * torch.arange(T))(s)
            )
        ),
        LISTED,
    ),
    "no mask": (between(unchanged), UNMASKED),
    "a mask of queries and keys, of merged scores": (between(lambda s: s + added(causal())), CAUSAL),
    "the same with a dimension": (between(lambda s: s.masked_fill(~causal()[None], float("-inf"))), CAUSAL),
    "scaled before, between and after": (
        between(
            lambda s: on_heads(lambda s: s * 0.5 + added(causal()))(s / 2.0),
            query=lambda q: merged(q * 0.25),
        ),
        CAUSAL,
    ),
    "weights that are split and merged": (
        between(weigh=lambda s: F.softmax(s, -1).view(B, H, T, T).view(B * H, T, T)),
        CAUSAL,
    ),
    "no dropout": (between(weigh=lambda s: F.dropout(F.softmax(s, -1), 0.0, True)), CAUSAL),
    "dropout outside of training": (between(weigh=lambda s: F.dropout(F.softmax(s, -1), 0.5, False)), CAUSAL),
    "einsum": (
        between(
            of_scores=lambda q, k: torch.einsum("nid,njd->nij", q, k),
            of_result=lambda w, v: torch.einsum("nij,njd->nid", w, v),
        ),
        CAUSAL,
    ),
    "matmul": (between(of_scores=lambda q, k: q @ k.mT, of_result=torch.matmul), CAUSAL),
    "products of merged scores alone": (
        between(
            query=unchanged,
            key=unchanged,
            value=unchanged,
            of_scores=lambda q, k: (q @ k.mT).view(B * H, T, T),
            of_result=lambda w, v: w.view(B, H, T, T) @ v,
        ),
        CAUSAL,
    ),
    "one head of keys": (between(key=lambda k: merged(repeated(k)), value=lambda v: merged(repeated(v))), CAUSAL),
    "flattened": (between(query=lambda q: q.flatten(0, 1), key=lambda k: k.contiguous().flatten(0, 1)), CAUSAL),
    "merged and split in the other order": (
        between(
            on_heads(lambda s: s + added(causal()), H, B),
            query=merged_otherwise,
            key=merged_otherwise,
            value=merged_otherwise,
            end=lambda out: out.view(H, B, T, -1).transpose(0, 1),
        ),
        CAUSAL,
    ),
    "a floor under the masked scores": (between(floored()), CAUSAL),
    "a floor that is a number": (between(lambda s: (s + added(causal())).clamp(min=-1e30)), CAUSAL),
    "a floor under documents": (between(floored(-1e30, lambda: added(documents(), float("-inf")))), PACKED),
    "the result as it is": (between(end=unchanged), CAUSAL),
    "rows of keys that are shared": (
        lambda q, k, v: between()(q, k[:1].expand(B, -1, -1, -1), v[:1].expand(B, -1, -1, -1)),
        CAUSAL,
    ),
    "values of another size": (
        between(on_heads(filled(documents)), value=lambda v: merged(v[..., :8])),
        PACKED,
    ),
    "a soft cap": (between(lambda s: with_mask(torch.tanh(s) * 2.0)), LISTED),
    "less a row's maximum": (between(lambda s: (t := with_mask(s)) - t.amax(-1, keepdim=True)), CAUSAL),
    "one after the other": (
        lambda q, k, v: (split := between(end=lambda out: out.view(B, H, T, 16)))(split(q, k, v), k, v),
        {"causal": 2},
    ),
    "written in place": (
        between(lambda s: on_heads(lambda s: s.add_(added(causal())))(s.div_(2.0))),
        CAUSAL,
    ),
}


@pytest.mark.parametrize("eager", [True, False], ids=["the graph", "compiled"])
@pytest.mark.parametrize("name", one_in(3, READ))
def test_rows_and_heads_in_one_dimension(name, eager):
    fn, expected = READ[name]
    assert_as_eager(fn, expected, tensors=inputs(B, H, 1 if name == "one head of keys" else H), eager=eager)


def without_gradients(fn):
    def changed(tensor):
        with torch.no_grad():
            return fn(tensor)

    return changed


def hooked(tensor):
    rows = merged(tensor)
    rows.register_hook(lambda gradient: gradient * 2)
    return rows


def in_bfloat16(fn):
    def changed(tensor):
        with torch.autocast("cpu", torch.bfloat16):
            return fn(tensor)

    return changed


def as_baddbmm(query, key):
    return torch.baddbmm(torch.ones(B * H, T, T, dtype=query.dtype), query, key.transpose(1, 2))


LEFT = {
    "all are merged in the other order, and split in this": (
        between(query=merged_otherwise, key=merged_otherwise, value=merged_otherwise),
        "rows and heads of its scores",
    ),
    "keys are merged in the other order": (between(key=merged_otherwise), "broadcast to each other"),
    "values are merged in the other order": (between(value=merged_otherwise), "broadcast to each other"),
    "queries are merged in the other order": (between(unchanged, query=merged_otherwise), "broadcast to each other"),
    "a query behind tokens": (between(query=merged_behind_tokens), UNREAD),
    "keys that are not split again": (between(key=lambda k: torch.cat([merged(k[:1]), merged(k[1:])])), UNREAD),
    "rows, heads and halves of tokens": (
        between(unchanged, **{name: lambda t: t.reshape(B * H * 2, T // 2, 16) for name in ("query", "key", "value")}),
        UNREAD,
    ),
    "softmax over queries": (between(weigh=lambda s: F.softmax(s, 1)), {}),
    "softmax over heads": (between(weigh=lambda s: F.softmax(s, 0)), {}),
    "softmax over two queries": (
        between(weigh=lambda s: F.softmax(s.view(B * H, T // 2, 2 * T), -1).view(s.shape)),
        UNREAD,
    ),
    "weights that are transposed": (between(weigh=lambda s: F.softmax(s, -1).mT), {}),
    "a transposed mask": (
        between(lambda s: (s.view(B, H, T, T).transpose(0, 1) + added(causal())).transpose(0, 1).reshape(s.shape)),
        CHANGED,
    ),
    "a mask for rows and heads": (
        between(lambda s: s.masked_fill(~KEYS_OF_HEADS.flatten(0, 1), -1e30)),
        "one dimension for rows and heads",
    ),
    "numbers for rows and heads that are added": (
        between(lambda s: s + added(KEYS_OF_HEADS.flatten(0, 1), -1e30)),
        "one dimension for rows and heads",
    ),
    "scores that are added to": (between(unchanged, of_scores=as_baddbmm), CHANGED),
    "a floor without a mask": (between(lambda s: s.clamp(min=-1e30)), CHANGED),
    "a floor that hides nothing": (between(floored(-20.0)), CHANGED),
    "a ceiling": (between(lambda s: (s + added(causal())).clamp(min=-1e30, max=1.0)), CHANGED),
    "a floor under a mask that is read": (between(floored(mask=lambda: added(KEYS))), "rounded or bounded"),
    "merged without gradients": (between(key=without_gradients(merged)), "gradients are switched off"),
    "split without gradients": (
        between(without_gradients(with_mask)),
        "gradients are switched off|not of query",
    ),
    "weights merged without gradients": (
        between(weigh=lambda s: without_gradients(lambda w: w.view(s.shape))(F.softmax(s, -1).view(B, H, T, T))),
        "gradients are switched off",
    ),
    "weights that are returned": (
        lambda q, k, v: (lambda w: (torch.bmm(w, merged(v)), w))(
            F.softmax(product(merged(q), merged(k)) + added(causal()), -1)
        ),
        "used elsewhere",
    ),
    "weights that are returned for each head": (
        lambda q, k, v: (lambda w: (torch.bmm(w.view(B * H, T, T), merged(v)), w))(
            F.softmax(product(merged(q), merged(k)) + added(causal()), -1).view(B, H, T, T)
        ),
        "used elsewhere",
    ),
    "expanded to merged scores": (
        lambda q, k, v: (lambda s: (torch.bmm(F.softmax(s, -1), merged(v)), causal().expand_as(s)))(
            product(merged(q), merged(k))
        ),
        "used elsewhere",
    ),
    "a hook on what is merged": (between(query=hooked), UNREAD),
    "scores without gradients": (between(lambda s: with_mask(s.detach())), "gradients are switched off"),
}


@pytest.mark.parametrize("eager", [True, False], ids=["the graph", "compiled"])
@pytest.mark.parametrize("name", one_in(3, LEFT))
def test_what_is_no_such_attention_stays(name, eager):
    fn, expected = LEFT[name]
    assert_as_eager(fn, expected, tensors=inputs(B, H, H), eager=eager)


def test_modes_of_autocast_inside():
    tensors = [tensor.detach().float() for tensor in inputs(B, H, H)]
    for change, reason in (
        (in_bfloat16(on_heads(lambda s: s + added(causal()).float())), "autocast is switched"),
        (on_heads(lambda s: s + added(causal(), -1e30).float()), None),
    ):
        torch._dynamo.reset()
        fn = between(change)
        run = specialized(fn)
        torch.testing.assert_close(run.call(*tensors), fn(*tensors))
        assert counts(run) == ({} if reason else CAUSAL)
        assert all(reason is not None and reason in skip for skip in run.skip_reasons)


def test_autocast_around_it():
    tensors = [tensor.detach().float().requires_grad_() for tensor in inputs(B, H, H)]

    def fn(query, key, value):
        with torch.autocast("cpu", torch.bfloat16):
            return between(on_heads(lambda s: s + added(causal(), -1e30).float()))(query, key, value)

    run = specialized(fn, eager=False)
    (out, *gradients), (wanted, *of_wanted) = (result_and_gradients(call, tensors) for call in (run.call, fn))
    assert counts(run) == CAUSAL
    assert out.dtype == wanted.dtype
    torch.testing.assert_close([out, *gradients], [wanted, *of_wanted], rtol=5e-2, atol=5e-2)


# -- sizes


def of_any_size(query, key, value):
    rows, heads, queries, size = query.shape
    keys = key.shape[2]
    scores = product(merged(query), merged(key))
    assert scores.size() == (rows * heads, queries, keys)
    hidden = torch.arange(queries)[:, None] < torch.arange(keys)
    mask = torch.zeros(queries, keys, dtype=query.dtype).masked_fill(hidden, -1e30).expand(rows, 1, queries, keys)
    scores = (scores.view(rows, heads, queries, keys) + mask).view(rows * heads, queries, keys)
    out = torch.bmm(F.softmax(scores, -1), merged(value))
    assert out.size() == (rows * heads, queries, size)
    return out.view(rows, heads, queries, size).transpose(1, 2).reshape(rows, queries, heads * size)


@pytest.mark.parametrize("sizes", [(2, 3, 12), (1, 2, 12), (2, 1, 12), (1, 1, 12), (2, 2, 12)])
def test_one_row_one_head_or_as_many_of_both(sizes):
    rows, heads, length = sizes
    assert_as_eager(of_any_size, CAUSAL, tensors=inputs(rows, heads, heads, length))


def test_one_token():
    """All of it is one number for each head: a causal mask shows that."""
    run = specialized(of_any_size)
    assert_close(of_any_size, run, inputs(2, 3, 3, 1))
    assert sum(counts(run).values()) == 1


def test_sizes_that_vary():
    run = specialized(of_any_size, dynamic=True)
    for rows, length in ((2, 12), (3, 7), (5, 9)):
        assert_close(of_any_size, run, inputs(rows, 3, 3, length))
    assert counts(run) == CAUSAL
    assert len(run.graphs) == 1


def test_sizes_that_are_not_proved_stay():
    """Keys of as many rows as queries times heads, as far as is known: how many rows, nothing says."""

    def fn(query, key, value):
        rows, heads, length, size = query.shape
        weights = F.softmax(product(merged(query), key), -1)
        return torch.bmm(weights, value).view(rows, heads, length, size)

    query, key, value = inputs(2, 3, 3)
    assert_as_eager(fn, UNREAD, tensors=[query, *(t.detach().flatten(0, 1).requires_grad_() for t in (key, value))])
