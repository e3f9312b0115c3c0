"""Which masks are proved, and which near misses stay; outputs and all gradients against eager in fp64."""

import re

import pytest
import torch

from tests.passes.specialize_attention.attention import (
    LENGTH,
    POSITIONS,
    Unknown,
    assert_as_eager,
    assert_close,
    attention,
    counts,
    inputs,
    specialized,
    square_tensors,
)
from tests.slow import one_in

T = LENGTH
STARTS = POSITIONS == 0
CU_SEQLENS = torch.tensor([0, 4, 10, 12])
LENGTHS = torch.tensor([4, 6, 2])
RIGHT_PADDING = torch.tensor([[1] * 9 + [0] * 3], dtype=torch.bool)
LEFT_PADDING = RIGHT_PADDING.flip(1)
HOLES = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1]])


def tokens():
    return torch.arange(T)


def causal():
    return tokens()[:, None] >= tokens()


def same(ids):
    return ids[:, None, :, None] == ids[:, None, None, :]


def ids_of_steps(positions):
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def added(visible, dtype=torch.float64, low=float("-inf")):
    return torch.where(visible, torch.zeros((), dtype=dtype), low)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


PROVED = {
    "comparison": (causal, [], "causal"),
    "tril of ones": (lambda: torch.ones(T, T, dtype=torch.bool).tril(), [], "causal"),
    "not triu": (lambda: torch.triu(torch.ones(T, T), diagonal=1) == 0, [], "causal"),
    "triu of minus infinity": (
        lambda: torch.triu(torch.full((T, T), float("-inf"), dtype=torch.float64), diagonal=1),
        [],
        "causal",
    ),
    "masked_fill": (
        lambda: torch.zeros(T, T, dtype=torch.float64).masked_fill(~causal(), float("-inf")),
        [],
        "causal",
    ),
    "numbers made tensors": (
        lambda: torch.where(causal(), number(0.0), number(torch.finfo(torch.float64).min)),
        [],
        "causal",
    ),
    "one minus the mask, times a large number": (lambda: (1.0 - causal().double()) * -1e30, [], "causal"),
    "through bf16": (lambda: ((1.0 - causal().bfloat16()) * -1e30).double(), [], "causal"),
    "expanded over heads": (lambda: causal()[None, None].expand(1, 2, T, T), [], "causal"),
    "repeated over heads": (lambda: causal()[None, None].repeat(1, 2, 1, 1), [], "causal"),
    "strictly less than one more": (lambda: tokens() < tokens()[:, None] + 1, [], "causal"),
    "all": (lambda: torch.ones(T, T, dtype=torch.bool), [], "unmasked"),
    "all, by bounds": (lambda: (tokens() < T) & (tokens()[:, None] >= 0), [], "unmasked"),
    "one element that is known": (lambda: causal() & (tokens()[3] >= 1), [], "causal"),
    "a window longer than the row": (lambda: causal() & (tokens()[:, None] - tokens() < T), [], "causal"),
    "causal window": (lambda: causal() & (tokens()[:, None] - tokens() < 4), [], "packed"),
    "window, by banded triangles": (
        lambda: torch.ones(T, T, dtype=torch.bool).tril().triu(diagonal=-3),
        [],
        "packed",
    ),
    "window on both sides": (lambda: (tokens()[:, None] - tokens()).abs() <= 3, [], "packed"),
    "blocks of tokens": (lambda: (tokens()[:, None] // 4 == tokens() // 4) & causal(), [], "packed"),
    "ids of a cumsum of starts": (lambda starts: same(starts.cumsum(-1)) & causal(), [STARTS], "packed"),
    "ids of a cumsum, seen both ways": (lambda starts: same(starts.long().cumsum(-1) - 1), [STARTS], "packed"),
    "cumsum of position == 0": (lambda pos: same((pos == 0).cumsum(-1)) & causal(), [POSITIONS], "packed"),
    "ids of positions, positions in order": (
        lambda pos: same(ids_of_steps(pos)) & (pos[:, None, None, :] <= pos[:, None, :, None]),
        [POSITIONS],
        "packed",
    ),
    "ids and window of positions": (
        lambda pos: (
            same(ids_of_steps(pos))
            & (pos[:, None, None, :] <= pos[:, None, :, None])
            & (pos[:, None, None, :] > pos[:, None, :, None] - 3)
        ),
        [POSITIONS],
        "packed",
    ),
    "searchsorted": (
        lambda cu: same(torch.searchsorted(cu, tokens(), right=True)[None]) & causal(),
        [CU_SEQLENS],
        "packed",
    ),
    "bucketize": (lambda cu: same(torch.bucketize(tokens(), cu, right=True)[None]) & causal(), [CU_SEQLENS], "packed"),
    "repeat_interleave": (
        lambda n: same(torch.repeat_interleave(torch.arange(3), n, output_size=T)[None]) & causal(),
        [LENGTHS],
        "packed",
    ),
    "documents, added": (
        lambda starts: added(same(starts.cumsum(-1)) & causal(), low=-1e30),
        [STARTS],
        "packed",
    ),
    "padding on the right": (lambda pad: causal() & pad[:, None, None], [RIGHT_PADDING], "packed"),
    "padding on the left, whose rows see nothing": (
        lambda pad: causal() & pad[:, None, None],
        [LEFT_PADDING],
        "packed",
    ),
    "padding in between, of integers": (lambda pad: causal() & (pad[:, None, None] != 0), [HOLES], "packed"),
    "padding, inverted": (lambda pad: ~(~causal() | ~pad.bool()[:, None, None]), [HOLES], "packed"),
    "padding alone": (lambda pad: pad[:, None, None].expand(1, 1, T, T), [HOLES.bool()], "packed"),
    "nothing but padding": (lambda pad: causal() & pad[:, None, None], [torch.zeros_like(RIGHT_PADDING)], "packed"),
    "padding by the number of tokens": (
        lambda number: causal() & (tokens() < number[:, None, None, None]),
        [torch.tensor([7])],
        "packed",
    ),
    "padding by the number of pads": (
        lambda number: causal() & (tokens() >= number[:, None, None, None]),
        [torch.tensor([5])],
        "packed",
    ),
    "padding and documents": (
        lambda pad, starts: same(starts.cumsum(-1)) & causal() & pad[:, None, None],
        [HOLES.bool(), STARTS],
        "packed",
    ),
    "padding and a window": (
        lambda pad: causal() & (tokens()[:, None] - tokens() < 4) & pad[:, None, None],
        [LEFT_PADDING],
        "packed",
    ),
    "padding and a window on both sides": (
        lambda pad: ((tokens()[:, None] - tokens()).abs() <= 3) & pad[:, None, None],
        [RIGHT_PADDING],
        "packed",
    ),
    "two paddings": (
        lambda pad, other: causal() & pad[:, None, None] & (other[:, None, None] == 1),
        [RIGHT_PADDING, HOLES],
        "packed",
    ),
    "two masks, added": (
        lambda starts: added(same(starts.cumsum(-1))) + added(causal()),
        [STARTS],
        "packed",
    ),
}


@pytest.mark.parametrize("spelling", one_in(3, PROVED))
def test_a_proved_mask_goes(spelling):
    make_mask, args, form = PROVED[spelling]
    fn, tensors = attention(make_mask), inputs()
    run = specialized(fn)
    assert_close(fn, run, tensors, *args)
    assert counts(run) == {form: 1}
    assert square_tensors(run) == []


def flipped():
    return causal() | ((tokens()[:, None] == 3) & (tokens() == 7))


def written():
    mask = causal().clone()
    mask[3, 7] = True
    return mask


def alibi():
    return added(causal()) + (tokens() - tokens()[:, None]).double() * 0.5


def per_head():
    return causal()[None] & (torch.arange(2)[:, None, None] + tokens()[:, None] - tokens() < 4)


UNSORTED = torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 1, 1, 2, 2]])
GAPS = torch.tensor([[0, 2, 4, 6, 0, 1, 3, 5, 7, 9, 0, 1]])
PREFIX = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)

UNKNOWN = {
    "ids that are an input": (lambda ids: same(ids) & causal(), [UNSORTED], "not proved to be sorted"),
    "a cumsum of numbers": (lambda steps: same(steps.cumsum(-1)) & causal(), [UNSORTED - 1], "not proved to be sorted"),
    "positions with gaps, documents elsewhere": (
        lambda pos, starts: same(starts.cumsum(-1)) & (pos[:, None, None] <= pos[:, None, :, None]),
        [GAPS, STARTS],
        "not proved to grow by one",
    ),
    "a window of positions with gaps": (
        lambda pos: same((pos == 0).cumsum(-1)) & causal() & (pos[:, None, :, None] - pos[:, None, None, :] < 3),
        [GAPS],
        "not proved to grow by one",
    ),
    "steps of two": (
        lambda pos: (
            same((torch.diff(pos, prepend=pos[:, :1] - 1) != 2).cumsum(-1))
            & (pos[:, None, None] <= pos[:, None, :, None])
        ),
        [GAPS],
        "not proved to grow by one",
    ),
    "a query does not see itself": (lambda: tokens()[:, None] > tokens(), [], "does not see itself"),
    "no query sees anything": (lambda: torch.zeros(T, T, dtype=torch.bool), [], "no query sees"),
    "the other triangle": (lambda: tokens()[:, None] <= tokens(), [], "none ahead"),
    "a window of two sizes": (
        lambda: (tokens()[:, None] - tokens() < 4) & (tokens() - tokens()[:, None] < 2),
        [],
        "take both equal",
    ),
    "every other key": (lambda: (tokens()[:, None] + tokens()) % 2 == 0, [], "not known|does not compare"),
    "one flipped element": (flipped, [], "one of several conditions"),
    "one element written": (written, [], "written in place"),
    "prefix": (lambda prefix: causal() | prefix[:, None, None], [PREFIX], "one of several conditions"),
    "padding of queries": (lambda pad: causal() & pad[:, None, :, None], [RIGHT_PADDING], "hides queries"),
    "padding of either": (
        lambda pad: causal() & (pad[:, None, None] | pad[:, None, :, None]),
        [HOLES.bool()],
        "one of several",
    ),
    "padding that some heads see": (
        lambda pad: causal() & (pad[:, None, None] | (torch.arange(2)[:, None, None] == 0)),
        [RIGHT_PADDING],
        "one of several conditions",
    ),
    "padding, added": (lambda pad: added(causal() & pad[:, None, None], low=-1e30), [LEFT_PADDING], "depends on the"),
    "padding, minus infinity added": (lambda pad: added(causal() & pad[:, None, None]), [LEFT_PADDING], "depends on"),
    "a mask that is an input": (lambda mask: mask, [torch.ones(T, T, dtype=torch.bool).tril()], "not known"),
    "scores that are an input": (lambda mask: mask, [torch.zeros(T, T, dtype=torch.float64)], "an input of the graph"),
    "scores by a vector that is an input": (
        lambda bias: added(causal()) + bias,
        [torch.zeros(T, dtype=torch.float64)],
        "more than 0",
    ),
    "one element of a tensor": (lambda lengths: causal() & (lengths[0] >= 1), [LENGTHS], "not proved to grow by one"),
    "one element less a token": (
        lambda lengths: causal() & (tokens()[:, None] < lengths[0] + 12),
        [LENGTHS],
        "not proved to grow by one",
    ),
    "ALiBi": (alibi, [], "more than 0"),
    "a number made a tensor, then written": (
        lambda: torch.where(causal(), number(0.0).sub_(1), -1e30),
        [],
        "neither 0 nor below",
    ),
    "numbers made a tensor": (lambda: torch.where(causal(), number([0.0, -1.0] * (T // 2)), -1e30), [], "more than 0"),
    "a bias that hides little": (lambda: added(causal(), low=-5.0), [], "neither 0 nor below"),
    "heads of different windows": (per_head, [], "neither causal nor a window"),
    "another search in each row": (
        lambda cu, order: same(torch.searchsorted(cu, order, right=True)) & causal(),
        [CU_SEQLENS, torch.arange(T).flip(0)[None]],
        "not proved to be sorted",
    ),
    "blocks of ids that are an input": (lambda ids: same(ids // 2) & causal(), [UNSORTED], "not proved to be sorted"),
    "ids of the token before, the last token's for the first": (
        lambda starts: same(starts.cumsum(-1)[0][tokens() - 1][None]) & causal(),
        [STARTS],
        "not proved to be sorted",
    ),
    "ids rounded to bf16": (lambda starts: same(starts.cumsum(-1).bfloat16()) & causal(), [STARTS], "not known"),
    "narrow integers": (
        lambda starts: same(starts.cumsum(-1, dtype=torch.int8)) & causal(),
        [STARTS],
        "not proved to be sorted",
    ),
}


@pytest.mark.parametrize("spelling", one_in(3, UNKNOWN))
def test_a_near_miss_is_not_classified(spelling):
    make_mask, args, reason = UNKNOWN[spelling]
    assert_as_eager(attention(make_mask), Unknown(reason), args)


def test_sorted_ids_may_be_assumed():
    def make_mask(ids):
        return same(ids) & causal()

    fn, tensors = attention(make_mask), inputs()
    run = specialized(fn, assume={"sorted_document_ids": True})
    assert_close(fn, run, tensors, UNSORTED.sort().values)
    assert counts(run) == {"packed": 1}


@pytest.mark.parametrize("batch", [1, 3])
def test_documents_of_each_row_are_their_own(batch):
    starts = torch.rand(batch, T) < 0.3

    def make_mask(starts):
        return same(starts.cumsum(-1)) & causal()

    fn, tensors = attention(make_mask), inputs(batch)
    run = specialized(fn)
    assert_close(fn, run, tensors, starts)
    assert counts(run) == {"packed": 1}


def test_one_row_of_ids_serves_all_rows():
    def make_mask(starts):
        return same(starts.cumsum(-1)) & causal()

    fn, tensors = attention(make_mask), inputs(3)
    run = specialized(fn)
    assert_close(fn, run, tensors, STARTS)
    assert counts(run) == {"packed": 1}


def test_ids_that_grow_in_the_first_row_alone_are_not_sorted():
    def make_mask(cu):
        values = (1 - 2 * torch.arange(2))[:, None] * tokens()
        return same(torch.searchsorted(cu, values, right=True)) & causal()

    assert_as_eager(attention(make_mask), Unknown("not proved to be sorted"), [CU_SEQLENS], inputs(2))


def test_padding_of_each_row_is_its_own():
    valid = torch.stack([RIGHT_PADDING[0], LEFT_PADDING[0], HOLES[0].bool()])
    fn, tensors = attention(lambda pad: causal() & pad[:, None, None]), inputs(3)
    run = specialized(fn)
    for pad in (valid, valid.flip(0), torch.zeros_like(valid), torch.ones_like(valid)):
        assert_close(fn, run, tensors, pad)
    assert counts(run) == {"packed": 1}
    assert len(run.graphs) == 1


def test_lengths_of_each_row_are_its_own():
    fn, tensors = attention(lambda number: causal() & (tokens() < number[:, None, None, None])), inputs(3)
    run = specialized(fn)
    assert_close(fn, run, tensors, torch.tensor([7, 12, 0]))
    assert counts(run) == {"packed": 1}


def test_documents_do_not_see_each_other():
    fn = attention(lambda pos: same(ids_of_steps(pos)) & (pos[:, None, None] <= pos[:, None, :, None]))
    run = specialized(fn)
    query, key, value = inputs()
    before = run.call(query, key, value, POSITIONS)
    edited = [tensor.detach().clone() for tensor in (query, key, value)]
    for tensor in edited:
        tensor[:, :, 4:10] += 1  # the second document
    after = run.call(*edited, POSITIONS)
    assert torch.equal(after[:, :, :4], before[:, :, :4])
    assert torch.equal(after[:, :, 10:], before[:, :, 10:])
    assert not torch.isclose(after[:, :, 4:10], before[:, :, 4:10]).all(-1).any()


def test_lengths_that_change_do_not_recompile():
    fn = attention(lambda starts: same(starts.cumsum(-1)) & causal())
    run = specialized(fn)
    tensors = inputs()
    for probability in (0.0, 0.2, 0.5, 1.0):
        assert_close(fn, run, tensors, torch.rand(1, T) < probability)
    assert len(run.graphs) == 1


def test_metadata_that_costs_more_than_the_mask_is_not_written(monkeypatch):
    """As on a GPU; on the CPU nothing is estimated."""
    asked = []

    def pays(capability, length, layers):
        asked.append((length, layers))
        return layers > 2

    monkeypatch.setattr("glue_compiler.passes.specialize_attention.analysis.pays", pays)

    def layers(number):
        def fn(query, key, value, starts):
            for _ in range(number):
                mask = same(starts.cumsum(-1)) & causal()
                query = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=causal())

        return fn

    for number, expected in ((2, {"causal": 1}), (3, {"packed": 3, "causal": 1})):
        fn, tensors = layers(number), inputs()
        torch._dynamo.reset()
        run = specialized(fn)
        assert_close(fn, run, tensors, STARTS)
        assert counts(run) == expected
        assert asked[-1] == (T, number)
        assert all("less time" in skip.reason for skip in run.report.passes[0].skips)


@pytest.mark.parametrize("documents", [False, True])
def test_dynamic_lengths(documents):
    def fn(query, key, value, starts):
        token = torch.arange(query.shape[2])
        mask = token[:, None] >= token
        if documents:
            mask = mask & same(starts.cumsum(-1))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    run = specialized(fn, dynamic=True)
    for length in (12, 17, 5):
        assert_close(fn, run, inputs(2, length=length), torch.rand(2, length) < 0.3)
    assert len(run.graphs) == 1
    assert counts(run) == {"packed" if documents else "causal": 1}


@pytest.mark.parametrize("first", [0, 1])
def test_dynamic_rows_of_padding_beside_dynamic_rows_of_tokens(first):
    """Each tensor has a symbol of its own for the number of rows; as in eager the padding may have more of them."""

    def fn(query, key, value, padding):
        row, token = torch.arange(query.shape[0])[:, None], torch.arange(query.shape[2])
        seen = padding[:, first:][row, token]
        mask = (token[:, None] >= token) & seen[:, None, None].bool()
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    run = specialized(fn, dynamic=True)
    # Sizes that are equal in the first batch are one symbol.
    for rows, length, more in ((3, 12, 1), (5, 17, 0), (4, 5, 2)):
        assert_close(fn, run, inputs(rows, length=length), torch.rand(rows + more, length + first) < 0.7)
    assert len(run.graphs) == 1
    assert counts(run) == {"packed": 1}
    with pytest.raises(IndexError, match="out of range"):
        run.call(*inputs(4), torch.ones(3, 12 + first, dtype=torch.bool))


def test_more_keys_than_queries_are_not_classified():
    def fn(query, key, value):
        mask = torch.arange(4)[:, None] >= torch.arange(T)
        return torch.nn.functional.scaled_dot_product_attention(query[:, :, :4], key, value, attn_mask=mask)

    assert_as_eager(fn, Unknown("as many keys"))


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        (causal().double().log(), lambda mask: mask),
        (causal(), lambda mask: mask),
        (causal().repeat(2, 1), lambda mask: mask[:T] & True),
        (causal().long(), lambda mask: mask == 1),
    ],
    ids=["added", "boolean", "a part", "compared"],
)
def test_a_mask_that_is_an_input_says_so(mask, given):
    run = specialized(attention(given), compiler="inductor")  # which makes no kernel of block lists on a CPU
    run.call(*inputs(), mask)
    (reason,) = set(run.skip_reasons)
    assert re.match("the mask is an input of the graph, '.*', so its contents are not known", reason)


def test_a_vector_that_is_an_input_is_read():
    run = specialized(attention(same), compiler="inductor")
    run.call(*inputs(), ids_of_steps(POSITIONS))
    assert run.skip_reasons
    assert all("is an input of the graph" not in reason for reason in run.skip_reasons)
