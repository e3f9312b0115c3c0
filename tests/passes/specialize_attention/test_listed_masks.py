"""Masks that are read when the graph runs: their kinds, spellings, writes and sizes; against eager in fp64."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.captured import compile_and_keep, count
from tests.passes.specialize_attention.attention import (
    LENGTH,
    assert_as_eager,
    attention,
    counts,
    inputs,
    run_as,
    specialized,
    square_tensors,
)
from tests.slow import one_in

T = LENGTH
LISTED = {"listed": 1}
mask_blocks = torch.ops.glue.mask_blocks.default
masked_attention = torch.ops.glue.masked_attention.default


def tokens(length=T):
    return torch.arange(length)


def causal(length=T):
    return tokens(length)[:, None] >= tokens(length)


def random_mask(*shape, share=0.5):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape))) < share


def biases(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def ids(rows, length=T):
    return torch.randint(3, (rows, length), generator=torch.Generator().manual_seed(0))


def slopes():
    return torch.tensor([0.5, 0.25], dtype=torch.float64)[:, None, None]


def sdpa(query, key, value, mask, **settings):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **settings)


def written_out(hide):
    """Softmax between two products, of scores that ``hide(scores, *args)`` has masked."""

    def fn(query, key, value, *args):
        return F.softmax(hide(query @ key.mT * 0.25, *args), dim=-1) @ value

    return fn


# -- kinds of masks

KINDS = {
    "an input": (lambda mask: mask, [random_mask(T, T)]),
    "an input of numbers": (lambda mask: mask, [biases(T, T)]),
    "unsorted documents": (lambda ids: (ids[:, None, :, None] == ids[:, None, None]) & causal(), [ids(2)]),
    "a prefix": (lambda prefix: causal() | prefix[:, None, None], [tokens()[None] < torch.tensor([[3], [7]])]),
    "chunks that see each other": (lambda: causal() | (tokens()[:, None] // 4 == tokens() // 4), []),
    "global tokens": (lambda seen: causal() | seen[:, None, None] | seen[:, None, :, None], [random_mask(2, T)]),
    "gaps of positions": (lambda pos: pos[:, None, None] <= pos[:, None, :, None], [(ids(2) + 1).cumsum(-1)]),
    "another in each row and head": (lambda mask: mask, [random_mask(2, 2, T, T)]),
    "ALiBi": (
        lambda: torch.where(causal(), (tokens() - tokens()[:, None]) * slopes(), float("-inf")),
        [],
    ),
    "queries that are hidden": (lambda pad: causal() & pad[:, None, :, None], [random_mask(2, T)]),
    "one vector over the keys": (lambda bias: bias[None], [biases(T)]),
    "one number a query": (lambda bias: bias, [biases(T, 1)]),
    "nothing that is seen": (lambda mask: mask, [torch.zeros(T, T, dtype=torch.bool)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind):
    make_mask, args = KINDS[kind]
    assert_as_eager(attention(make_mask), LISTED, args, inputs(2))


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_kinds_compiled(kind):
    make_mask, args = KINDS[kind]
    assert_as_eager(attention(make_mask), LISTED, args, inputs(2), eager=False)


FILLINGS = [float("-inf"), -1e30, torch.finfo(torch.float64).min]
SPELLINGS = {
    "masked_fill": lambda low: lambda scores, mask: scores.masked_fill(~mask, low),
    "where": lambda low: lambda scores, mask: torch.where(mask, scores, low),
    "added": lambda low: lambda scores, mask: scores + torch.where(mask, 0.0, low).double(),
}


@pytest.mark.parametrize("low", FILLINGS)
@pytest.mark.parametrize("spelling", one_in(3, SPELLINGS))
@pytest.mark.parametrize("share", [0.5, 0.15], ids=["no empty rows", "empty rows"])
def test_softmax_between_two_products(spelling, low, share):
    mask = random_mask(2, 1, T, T, share=share)
    assert mask.any(-1).all() == (share == 0.5)
    low = max(low, -1e30) if spelling == "added" and low != float("-inf") else low
    assert_as_eager(written_out(SPELLINGS[spelling](low)), LISTED, [mask], inputs(2))


@pytest.mark.parametrize("spelling", ["masked_fill", "where"])
def test_scores_that_hide_little_are_no_mask(spelling):
    assert_as_eager(written_out(SPELLINGS[spelling](-5.0)), "changed in another way", [random_mask(T, T)])


def test_a_bias_that_is_added_and_hides_little():
    assert_as_eager(written_out(SPELLINGS["added"](-5.0)), LISTED, [random_mask(T, T)])


def test_scores_rounded_after_the_mask():
    """What was a finite number may be minus infinity then."""

    def fn(query, key, value, mask):
        query, key, value = (each.half() for each in (query, key, value))
        scores = (query @ key.mT).float() + torch.where(mask, 0.0, -1e30)
        return F.softmax(scores.half(), -1) @ value

    run = specialized(fn)
    run.call(*inputs(), random_mask(T, T))
    assert counts(run) == {}
    assert "rounded" in run.skip_reasons[0]


# -- sizes


@pytest.mark.parametrize(("queries", "keys"), one_in(2, [(1, 1), (1, 7), (4, 12), (5, 130), (130, 129), (128, 256)]))
@pytest.mark.parametrize("write", [False, True], ids=["sdpa", "written out"])
def test_more_keys_than_queries(queries, keys, write):
    fn = written_out(lambda scores, mask: scores.masked_fill(~mask, -1e30)) if write else sdpa
    query, key, value = (inputs(2, length=n)[i] for i, n in enumerate((queries, keys, keys)))
    assert_as_eager(fn, LISTED, [random_mask(2, 1, queries, keys)], [query, key, value])


@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_heads(key_heads):
    def fn(query, key, value, mask):
        key, value = (heads.repeat_interleave(4 // key_heads, 1) for heads in (key, value))
        return sdpa(query, key, value, mask)

    run = specialized(fn)
    assert_as_eager(fn, LISTED, [random_mask(1, 4, T, T)], inputs(1, 4, key_heads))
    run.call(*inputs(1, 4, key_heads), random_mask(1, 4, T, T))
    (call,) = run.graph.graph.find_nodes(op="call_function", target=masked_attention)
    assert call.args[1].meta["example_value"].shape[1] == key_heads


@pytest.mark.parametrize("write", one_in(2, [False, True]), ids=["sdpa", "written out"])
def test_sizes_that_vary(write):
    fn = written_out(lambda scores, mask: scores.masked_fill(~mask, -1e30)) if write else sdpa
    run = specialized(fn, dynamic=True, eager=False)
    for rows, queries, keys in ((3, 130, 150), (4, 200, 300), (5, 140, 500)):
        mask = random_mask(rows, 1, queries, keys)
        tensors = [inputs(rows, length=n)[i] for i, n in enumerate((queries, keys, keys))]
        for found, wanted in zip(run_as(run.call, tensors, [mask]), run_as(fn, tensors, [mask]), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert counts(run) == LISTED
    assert len(run.graphs) == 1


def test_a_query_that_is_the_result_of_an_attention_says_for_how_many_queries_lists_are():
    def fn(query, key, value, seen):
        token = torch.arange(query.shape[2])
        query = F.scaled_dot_product_attention(query, key, value, attn_mask=token[:, None] >= token)
        return (query @ key.mT).masked_fill(~seen[:, None, None], -1e30).softmax(-1) @ value

    run, tensors, seen = specialized(fn), inputs(1), random_mask(1, T)
    for tensor, dim in (*((tensor, 2) for tensor in tensors), (seen, 1)):
        torch._dynamo.mark_dynamic(tensor, dim)
    torch.testing.assert_close(run.call(*tensors, seen), fn(*tensors, seen), rtol=1e-10, atol=1e-10)
    assert counts(run) == {"causal": 1, "listed": 1}


def test_a_mask_for_other_sizes_is_as_much_an_error_as_in_eager():
    run = specialized(sdpa, dynamic=True)
    with pytest.raises(Exception, match="size|shape|expand"):
        run.call(*inputs(2), random_mask(2, 1, T, T + 1))


# -- what is read


def test_what_is_expanded_is_read_as_it_was():
    def fn(query, key, value, mask):
        wide = mask[:, None].expand(2, 2, T, T).contiguous()
        return sdpa(query, key, value, wide)

    run = specialized(fn)
    assert_as_eager(fn, LISTED, [random_mask(2, T, T)], inputs(2))
    run.call(*inputs(2), random_mask(2, T, T))
    (call,) = run.graph.graph.find_nodes(op="call_function", target=masked_attention)
    assert call.args[3].meta["example_value"].shape == (2, 1, T, T)
    assert not any(shape == (2, 2, T, T) for shape in (n.meta["example_value"].shape for n in call.args[:4]))


def test_a_part_of_a_longer_mask():
    assert_as_eager(lambda q, k, v, mask: sdpa(q, k, v, mask[..., :T, :T]), LISTED, [random_mask(1, 1, 40, 30)])


def test_what_is_expanded_and_written_is_read_after_it():
    def fn(query, key, value, mask):
        small = mask.clone()
        wide = small.expand(2, 2, T, T).contiguous()
        small.logical_not_()
        return sdpa(query, key, value, wide), small

    assert_as_eager(fn, LISTED, [random_mask(T, T)], inputs(2))


def test_a_mask_detached_from_what_has_a_gradient():
    def fn(query, key, value, bias):
        return sdpa(query, key, value, bias.detach()) + bias.sum()

    assert_as_eager(fn, LISTED, tensors=[*inputs(), biases(T, T).requires_grad_()])


def test_numbers_that_are_no_floats_stay():
    assert_as_eager(written_out(lambda scores, bias: scores + bias), "are added to the scores", [ids(T)])


# -- writes


def written_between(query, key, value, mask):
    mask = mask ^ causal()
    once = sdpa(query, key, value, mask)
    mask[3] = True
    mask.logical_not_()
    return once + sdpa(query, key, value, mask), mask


def written_afterwards(query, key, value, mask):
    mask = mask ^ causal()
    out = sdpa(query, key, value, mask)
    return out, mask.logical_not_()


def numbers_written_in_part(query, key, value, bias):
    bias = bias.clone()
    bias[2:5] = 1.0
    return sdpa(query, key, value, bias)


def input_written_between(query, key, value, mask):
    once = sdpa(query.detach(), key.detach(), value.detach(), mask)
    mask.logical_not_()
    return once + sdpa(query, key, value, mask)


@pytest.mark.parametrize("eager", [True, False], ids=["the graph", "compiled"])
@pytest.mark.parametrize(
    ("fn", "expected", "mask"),
    [
        (written_between, {"listed": 2}, random_mask(T, T)),
        (written_afterwards, LISTED, random_mask(T, T)),
        (numbers_written_in_part, "perhaps by what has a gradient", biases(T, T)),
        (input_written_between, {"listed": 2}, random_mask(T, T)),
    ],
)
def test_masks_that_are_written(fn, expected, mask, eager):
    assert_as_eager(fn, expected, [mask], eager=eager)


@pytest.mark.parametrize("write", ["logical_not_()", "data.zero_()"])
def test_a_caller_may_write_a_mask_that_is_returned_before_backward(write):
    def fn(query, key, value, mask):
        mask = mask ^ causal()
        return sdpa(query, key, value, mask), mask

    def gradients(call):
        tensors = inputs()
        out, mask = call(*tensors, random_mask(T, T))
        eval(f"mask.{write}", {"mask": mask})
        out.pow(2).sum().backward()
        return [tensor.grad for tensor in tensors]

    torch.manual_seed(0)
    expected = gradients(fn)
    torch.manual_seed(0)
    run = specialized(fn, eager=False)
    torch.testing.assert_close(gradients(run.call), expected)
    assert counts(run) == LISTED


# -- once for all layers


def layers(masks):
    def fn(query, key, value, mask):
        for each in masks(mask):
            query = sdpa(query, key, value, each)
        return query

    return fn


@pytest.mark.parametrize(
    ("masks", "lists"),
    [
        (lambda mask: [mask] * 3, 1),
        (lambda mask: [mask & causal() for _ in range(3)], 1),
        (lambda mask: [mask, mask[:, None].expand(-1, 2, -1, -1)[:, 0]], 1),
        (lambda mask: [mask, ~mask], 2),
    ],
)
def test_lists_are_made_once_a_mask(masks, lists):
    run, mask = specialized(layers(masks)), random_mask(1, T, T)
    assert_as_eager(layers(masks), {"listed": len(masks(mask))}, [mask])
    run.call(*inputs(), mask)
    assert count(run.graph, mask_blocks) == lists


@pytest.mark.parametrize("where", one_in(2, ["outside", "inside"]))
def test_lists_of_checkpoint_bodies_are_made_once_outside(where):
    def layer(query, key, value, given):
        return sdpa(query, key, value, given if where == "outside" else given | causal())

    def fn(query, key, value, mask):
        given = mask | causal() if where == "outside" else mask
        query = checkpoint(layer, query, key, value, given, use_reentrant=False)
        return checkpoint(layer, query, key, value, given, use_reentrant=False)

    mask = random_mask(T, T)
    assert_as_eager(fn, {"listed": 2}, [mask], eager=False)
    run = compile_and_keep(fn, passes={"specialize_attention": True, "hoist_metadata": True})
    run.call(*inputs(), mask)
    assert counts(run) == {"listed": 2}
    assert len(run.graph.graph.find_nodes(op="call_function", target=mask_blocks)) == 1
    assert count(run.graph, mask_blocks) == 1


# -- modes


@pytest.mark.parametrize("mode", [torch.no_grad, contextlib.nullcontext])
def test_modes_of_gradients(mode):
    def fn(query, key, value, mask):
        with mode():
            out = sdpa(query, key, value, mask)
        return out + query + key + value

    assert_as_eager(fn, LISTED, [random_mask(T, T)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_graph_called_without_gradients(mode):
    run, tensors, mask = specialized(sdpa, eager=False), inputs(), random_mask(T, T)
    with mode():
        torch.testing.assert_close(run.call(*tensors, mask), sdpa(*tensors, mask), rtol=1e-10, atol=1e-10)
    assert counts(run) == LISTED


@pytest.mark.parametrize("kind", ["boolean", "added", "written out"])
def test_autocast(kind):
    def exact(query, key, value, mask):
        if kind == "written out":
            return F.softmax((query @ key.mT).masked_fill(~mask, float("-inf")), -1) @ value
        return sdpa(query, key, value, mask)

    def fn(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return exact(*args)

    mask = biases(T, T).float() if kind == "added" else random_mask(T, T) | (tokens() == 0)
    torch.manual_seed(0)
    tensors = [tensor.detach().float().requires_grad_() for tensor in inputs()]
    run = specialized(fn, eager=False)
    wanted, found = (run_as(call, tensors, [mask]) for call in (fn, run.call))
    assert counts(run) == LISTED
    assert found[0][0].dtype == wanted[0][0].dtype == torch.bfloat16
    for got, want in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2 * float(want.abs().max()))


def test_what_autocast_rounds_to_infinity_hides():
    """As in eager, where it casts what is added too: a row of the least numbers of fp32 is empty in bf16."""

    def fn(query, key, value, mask):
        with torch.autocast("cpu", torch.bfloat16):
            return sdpa(query, key, value, torch.where(mask, 0.0, torch.finfo(torch.float32).min))

    tensors = [tensor.detach().float() for tensor in inputs()]
    run = specialized(fn)
    out = run.call(*tensors, random_mask(T, T) & (tokens()[:, None] > 2))
    assert counts(run) == LISTED
    assert (out[:, :, :3] == 0).all()
    assert (out[:, :, 3:] != 0).any(-1).all()


# -- where lists do not pay


def test_lists_that_cost_more_than_the_mask_are_not_made(monkeypatch):
    """As on a GPU; on the CPU nothing is estimated."""
    asked = []
    monkeypatch.setattr(
        "glue_compiler.passes.specialize_attention.analysis.lists_pay", lambda *given: asked.append(given) or False
    )
    assert_as_eager(sdpa, "for 12 queries it costs less time than block lists", [random_mask(T, T)])
    assert asked == [(None, T)]


def test_dropout_keeps_the_mask():
    run = specialized(lambda *given: sdpa(*given, dropout_p=0.5))
    run.call(*inputs(), random_mask(T, T))
    assert counts(run) == {}
    assert "the mask is an input of the graph" in run.skip_reasons[0]
    assert "attention dropout is 0.5" in run.skip_reasons[0]


def test_the_mask_is_all_that_is_left():
    run = specialized(attention(lambda prefix: causal() | prefix[:, None, None]))
    run.call(*inputs(), random_mask(1, T))
    assert {value for value in square_tensors(run) if "getitem" not in value}


# -- masks that the caller writes before backward


def added(query, key, value, mask):
    return F.softmax(query @ key.mT * 0.25 + mask, -1) @ value


def filled(query, key, value, mask):
    return F.softmax((query @ key.mT * 0.25).masked_fill(mask, -1e30), -1) @ value


def copies(run):
    return sum(node.target is torch.ops.glue.materialized.default for node in run.graph.graph.nodes)


@pytest.mark.parametrize("write", [lambda mask: mask.data.zero_(), lambda mask: mask.zero_()], ids=["data", "mask"])
@pytest.mark.parametrize(("fn", "dtype"), [(added, torch.float64), (sdpa, torch.bool)], ids=["added", "boolean"])
def test_a_mask_that_the_caller_writes_before_backward(fn, dtype, write):
    """Neither a sum nor sdpa of a boolean mask needs it there."""
    found = []
    for call in (fn, specialized(fn).call):
        torch.manual_seed(0)
        tensors = inputs()
        mask = torch.randn(1, 1, T, T).relu().to(dtype)
        out = call(*tensors, mask)
        write(mask)
        found.append(torch.autograd.grad(out.sum(), tensors))
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("call", "mask", "grad", "expected"),
    [
        (added, torch.zeros(T, T).double(), True, 1),
        (added, torch.zeros(T, T).double(), False, 0),
        (sdpa, torch.zeros(T, T).double(), True, 0),
        (sdpa, torch.ones(T, T).bool(), True, 1),
        (sdpa, torch.ones(T, T).bool(), False, 0),
        (filled, torch.zeros(T, T).bool(), True, 0),
    ],
    ids=["added", "without gradients", "sdpa", "sdpa, boolean", "sdpa, without gradients", "filled"],
)
def test_a_mask_is_copied_only_where_eager_does_not_keep_it_for_backward(call, mask, grad, expected):
    run = specialized(call)
    run.call(*(each.detach().requires_grad_(grad) for each in inputs()), mask)
    assert counts(run) == {"listed": 1}
    assert copies(run) == expected


def test_a_boolean_mask_that_was_made_in_inference_mode():
    with torch.inference_mode():
        mask = causal()
    run, tensors = specialized(sdpa), inputs()
    wanted = torch.autograd.grad(sdpa(*tensors, mask).sum(), tensors)
    for got, want in zip(torch.autograd.grad(run.call(*tensors, mask).sum(), tensors), wanted, strict=True):
        torch.testing.assert_close(got, want)
