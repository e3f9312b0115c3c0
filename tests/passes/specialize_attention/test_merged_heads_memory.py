"""Gradients, dropout, memory and writes of attention whose rows and heads are one dimension for its products."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.captured import count
from tests.passes.specialize_attention.attention import assert_as_eager, counts, inputs, specialized, square_tensors
from tests.passes.specialize_attention.merged_heads import (
    CAUSAL,
    CHANGED,
    LOWEST,
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
    unchanged,
)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (2,), (0, 1, 2)], ids=str)
def test_what_is_frozen_gets_no_gradient(frozen):
    tensors = [tensor.detach().requires_grad_(i not in frozen) for i, tensor in enumerate(inputs(B, H, H))]
    assert_as_eager(between(), CAUSAL, tensors=tensors, eager=False)


def test_dropout_is_passed_on():
    run = specialized(between(weigh=lambda s: F.dropout(F.softmax(s, -1), 0.5, True)))
    run.call(*inputs(B, H, H))
    assert counts(run) == CAUSAL
    (call,) = run.graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert call.kwargs["dropout_p"] == 0.5
    assert call.kwargs["is_causal"]


def test_no_scores_are_left():
    run = specialized(between())
    run.call(*inputs(B, H, H))
    assert counts(run) == CAUSAL
    assert square_tensors(run) == []
    assert count(run.graph, torch.bmm) == 0
    assert [node.name for node in run.graph.graph.nodes if tuple(_shape(node)[:1]) == (B * H,)] == [
        run.graph.graph.find_nodes(op="call_method", target="flatten")[0].name
    ]


def _shape(node):
    value = node.meta.get("example_value")
    return value.shape if isinstance(value, torch.Tensor) else ()


def test_in_a_region():
    def fn(query, key, value):
        return checkpoint(between(), query, key, value, use_reentrant=False)

    assert_as_eager(fn, CAUSAL, tensors=inputs(B, H, H), eager=False)


def query_written(query, key, value):
    """The products keep a copy of it, which is not written."""
    query = (query * 2).transpose(1, 2).contiguous().transpose(1, 2)
    out = between()(query, key, value)
    query.zero_()
    return out


def query_written_after_it_was_copied(query, key, value):
    doubled = query.detach() * 2
    rows = merged(doubled.transpose(0, 1)).clone()
    doubled.zero_()
    return between(unchanged, query=lambda q: rows, key=merged_otherwise, value=merged_otherwise)(query, key, value)


def merged_query_written(query, key, value):
    rows = merged(query * 2)
    rows.mul_(3)
    return between(query=lambda q: rows)(query, key, value)


def scores_written_in_a_view(query, key, value):
    def change(scores):
        scores.view(B, H, T, T).add_(added(causal()))
        return scores

    return between(change)(query, key, value)


def scores_written_under_a_view(query, key, value):
    def change(scores):
        split = scores.view(B, H, T, T)
        scores.mul_(2.0)
        return (split + added(causal())).view(scores.shape)

    return between(change)(query, key, value)


def scores_filled_in_a_view(query, key, value):
    return between(on_heads(lambda s: s.masked_fill_(~causal(), LOWEST)))(query, key, value)


@pytest.mark.parametrize("eager", [True, False], ids=["the graph", "compiled"])
@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (query_written, "written in place later"),
        (query_written_after_it_was_copied, "written in place inside of it"),
        (merged_query_written, UNREAD),
        (scores_written_in_a_view, CHANGED),
        (scores_written_under_a_view, "used elsewhere|another way"),
        (scores_filled_in_a_view, CAUSAL),
    ],
)
def test_writes_in_place(fn, expected, eager):
    assert_as_eager(fn, expected, tensors=inputs(B, H, H), eager=eager)


@pytest.mark.parametrize("write", ["out += 1", "out.data.zero_()"])
@pytest.mark.parametrize("end", [unchanged, lambda out: out.view(B, H, T, 16).transpose(1, 2)])
def test_a_caller_may_write_the_result_before_backward(end, write):
    def gradients(call):
        torch.manual_seed(0)
        tensors = inputs(B, H, H)
        out = call(*tensors)
        exec(write, {"out": out})
        out.pow(2).sum().backward()
        return [tensor.grad for tensor in tensors]

    fn = between(end=end)
    expected = gradients(fn)
    run = specialized(fn, eager=False, compiler="aot_eager")
    torch.testing.assert_close(gradients(run.call), expected)
    assert counts(run) == CAUSAL


@pytest.mark.parametrize("write", ["given.mul_(3)", "given.data.mul_(3)"])
def test_a_caller_may_write_what_was_merged_before_backward(write):
    """It was copied, and backward of the products reads the copies."""

    def fn(query, key, value):
        return between(query=merged_otherwise, key=merged_otherwise, value=merged_otherwise, change=unchanged)(
            query, key, value
        )

    def gradients(call):
        torch.manual_seed(0)
        leaves = inputs(B, H, H)
        tensors = [leaf * 1 for leaf in leaves]
        out = call(*tensors)
        for given in tensors:
            exec(write, {"given": given})
        out.pow(2).sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients(fn)
    run = specialized(fn, eager=False)
    torch.testing.assert_close(gradients(run.call), expected)
    assert counts(run) == UNMASKED


# -- what has other rows and heads than the query


def test_keys_of_rank_three_are_those_of_heads():
    """A product of four dimensions with three repeats the three for each row: as many rows as heads tell nothing."""

    def fn(query, key, value):
        rows, _, length, size = query.shape
        key, value = (each.view(rows, length, size) for each in (key, value))
        return torch.softmax(query @ key.transpose(1, 2), -1) @ value

    left = "softmax between two products that are not of query, key and value"
    assert_as_eager(fn, left, tensors=inputs(2, 2, 1))


@pytest.mark.parametrize("grouping", [(3, 2), (6, 1), (1, 6)])
def test_scores_in_other_rows_and_heads_for_a_mask(grouping):
    rows, heads = grouping
    ids = (torch.arange(12) >= torch.arange(1, rows + 1)[:, None]).cumsum(-1)

    def fn(query, key, value):
        visible = (ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(12, 12, dtype=torch.bool).tril()
        scores = (query @ key.transpose(-1, -2)).view(rows, heads, 12, 12)
        scores = scores.masked_fill(~visible, -1e30).view(2, 3, 12, 12)
        return torch.softmax(scores, -1) @ value

    assert_as_eager(fn, "changed in another way than by a scale", tensors=inputs(2, 3, 3, 12))


@pytest.mark.parametrize("place", ["result", "weights", "scores"])
def test_what_is_written_into_a_given_tensor_is_written(place):
    def fn(query, key, value):
        out = torch.zeros(6 * 12 * 16, dtype=query.dtype)

        def given(name, size):
            return {"out": out[: 6 * 12 * size].view(6, 12, size)} if name == place else {}

        query, key, value = (each.detach().flatten(0, 1) for each in (query, key, value))
        scores = torch.bmm(query, key.transpose(1, 2), **given("scores", 12))
        weights = torch.softmax(scores, -1, **given("weights", 12))
        return torch.bmm(weights, value, **given("result", 16)), out

    run = specialized(fn)
    tensors = inputs(2, 3, 3, 12)
    torch.testing.assert_close(run.call(*tensors), fn(*tensors))
