"""Programs that differ in what an operator does, or in when: each against eager in fp64, beside its near miss."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import (
    LENGTH,
    POSITIONS,
    Unknown,
    assert_as_eager,
    counts,
    inputs,
    run_as,
    specialized,
)
from tests.slow import one_in

T = LENGTH
STARTS = POSITIONS == 0
PADDING = torch.tensor([[1, 1, 0, 1, 1, 1, 2, 0, 1, 1, 0, 0]])
LONGER_PADDING = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 2, 0, 1, 1, 0, 0]])
SORTED = torch.tensor([4, 10, 12])
CAUSAL, PACKED, UNMASKED = {"causal": 1}, {"packed": 1}, {"unmasked": 1}


def tokens():
    return torch.arange(T)


def causal():
    return tokens()[:, None] >= tokens()


def added(low=-1e30, visible=None):
    return torch.where(causal() if visible is None else visible, 0.0, low).double()


def same(ids):
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal()


def sdpa(query, key, value, mask, **settings):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **settings)


def masked_by(make_mask, **settings):
    return lambda query, key, value, *args: sdpa(query, key, value, make_mask(*args), **settings)


def written_out(scores=None, mask=None, softmax=None, weights=None):
    """Softmax between two products, with one step written in another way."""
    scores = scores or (lambda query, key: query @ key.transpose(2, 3) * 0.25)
    mask = mask or (lambda scores: scores.masked_fill(~causal(), float("-inf")))
    softmax = softmax or (lambda scores: F.softmax(scores, dim=-1))
    weights = weights or (lambda weights: weights)
    return lambda query, key, value: weights(softmax(mask(scores(query, key)))) @ value


# -- arguments

MASKS = {
    "x.where(condition, other)": (lambda pad: added().where(pad[0] > 100, added()), [PADDING], CAUSAL),
    "x.where(condition, other), and the other differs": (
        lambda pad: added().where(pad[0] > 100, torch.zeros(T, T).double()),
        [PADDING],
        Unknown("one of several conditions"),
    ),
    "add with alpha": (lambda: torch.add(torch.zeros(T, T), (~causal()).float(), alpha=-1e30).double(), [], CAUSAL),
    "sub with alpha": (lambda: torch.sub(tokens()[:, None], tokens(), alpha=1) >= 0, [], CAUSAL),
    "sub with another alpha": (
        lambda: torch.sub(tokens()[:, None], tokens(), alpha=2) >= 0,
        [],
        Unknown("neither causal"),
    ),
    "rsub": (lambda: torch.rsub(tokens(), tokens()[:, None]) >= 0, [], CAUSAL),
    "rsub with alpha": (lambda: torch.rsub(tokens(), tokens()[:, None], alpha=2) >= 0, [], Unknown("neither causal")),
    "diff along the tokens": (
        lambda pos: same((torch.diff(pos, axis=1, prepend=pos[:, :1] - 1) != 1).cumsum(-1)),
        [POSITIONS],
        PACKED,
    ),
    "a view of the same bits": (lambda: added().view(torch.float64), [], CAUSAL),
    "a view of other bits": (
        lambda: added().view(torch.int64).view(torch.float64),
        [],
        Unknown("more than 0 or minus infinity"),
    ),
    "an out argument": (
        lambda: torch.ge(tokens()[:, None], tokens() + 3, out=torch.empty(T, T, dtype=torch.bool)) | causal(),
        [],
        Unknown("one of several conditions"),
    ),
    "tril with a named diagonal": (lambda: torch.tril(torch.ones(T, T), diagonal=0) != 0, [], CAUSAL),
    "tril with another diagonal": (lambda: torch.tril(torch.ones(T, T), diagonal=1) != 0, [], Unknown("none ahead")),
    "part of the padding": (lambda pad: causal() & (pad > 0)[:, None, None, 1:], [LONGER_PADDING], PACKED),
    "the first of a longer padding": (lambda pad: causal() & (pad > 0)[:, None, None, :T], [LONGER_PADDING], PACKED),
    "every other padding": (
        lambda pad: causal() & (pad > 0)[:, None, None, ::2],
        [PADDING.repeat_interleave(2, 1)],
        Unknown("no vector over tokens"),
    ),
    "padding that is transposed": (lambda pad: causal() & (pad.t() > 0)[:, None, None], [PADDING.t()], PACKED),
    "padding with a token filled": (
        lambda pad: causal() & (pad > 0).masked_fill(tokens() == 3, False)[:, None, None],
        [PADDING],
        PACKED,
    ),
    "padding with values filled": (
        lambda pad: causal() & (pad.masked_fill(pad > 1, 7) != 7)[:, None, None],
        [PADDING],
        Unknown("no vector over tokens"),
    ),
    # -- what dtypes make of numbers
    "rounded to zero": (lambda: added().where(~causal(), torch.full((), 1e-9).double()).half().double(), [], CAUSAL),
    "not rounded": (
        lambda: added().where(~causal(), torch.full((), 1e-3).double()).half().double(),
        [],
        Unknown("neither 0 nor below"),
    ),
    "rounded to infinity": (lambda: added(-1e6).half().double(), [], CAUSAL),
    "wrapped in int8": (
        lambda starts: same((starts.cumsum(-1) * 128).to(torch.int8)),
        [STARTS],
        Unknown("not proved to be"),
    ),
    "wrapped in int64": (
        lambda starts: same(starts.cumsum(-1) * 2**62 * 4),
        [STARTS],
        Unknown("not proved to be sorted"),
    ),
    "not wrapped": (lambda starts: same((starts.cumsum(-1) + 128).to(torch.int32)), [STARTS], PACKED),
    "wrapped in uint8": (
        lambda: (torch.full((T, T), 200, dtype=torch.uint8) + 56 != 0) | causal(),
        [],
        Unknown("one of several conditions"),
    ),
    "cut to integers": (lambda: torch.full((T, T), 1.5).tril().int().bool(), [], CAUSAL),
    "cut to zero": (
        lambda: torch.full((T, T), 0.5).tril().int().bool() | ~causal(),
        [],
        Unknown("does not see itself"),
    ),
    "compared as floats": (
        lambda: (tokens() + 2**24 < 16777217.0) | causal(),
        [],
        Unknown("one of several conditions"),
    ),
    "zero times infinity": (lambda: (~causal()).double() * float("-inf"), [], Unknown("neither 0 nor below")),
    "infinity minus infinity": (lambda: added(float("-inf")) - added(float("-inf")), [], Unknown("more than 0")),
    "plus infinity": (lambda: added() + added(float("inf"), tokens() > 0), [], Unknown("neither 0 nor below")),
    # -- the first token of a row
    "the first token has an id of its own": (
        lambda starts: same(torch.where(tokens() == 0, 5, starts.cumsum(-1))),
        [STARTS],
        Unknown("the first token of a row in its own way"),
    ),
    "a search for another number at the first token": (
        lambda ends: same(torch.searchsorted(ends, torch.where(tokens() == 0, 100, tokens()), right=True)[None]),
        [SORTED],
        Unknown("not proved to be sorted"),
    ),
}


@pytest.mark.parametrize("spelling", one_in(3, MASKS))
def test_masks(spelling):
    make_mask, args, expected = MASKS[spelling]
    assert_as_eager(masked_by(make_mask), expected, args)


CHAINS = {
    "softmax with a named input": (written_out(softmax=lambda s: torch.softmax(input=s, dim=-1)), CAUSAL),
    "softmax over queries": (written_out(softmax=lambda s: s.softmax(2)), None),
    "a safe softmax": (written_out(softmax=lambda s: torch.ops.aten._safe_softmax(s, -1)), None),
    "a key with mT": (written_out(scores=lambda q, k: q.matmul(k.mT)), CAUSAL),
    "a rounded division": (
        written_out(scores=lambda q, k: torch.div(q @ k.mT, 0.3, rounding_mode="floor")),
        "changed in another way",
    ),
    "a division": (written_out(scores=lambda q, k: torch.div(q @ k.mT, 4.0)), CAUSAL),
    "dropout by name, off": (written_out(weights=lambda w: torch.dropout(w, 0.5, train=False)), CAUSAL),
    "dropout of nothing": (written_out(weights=lambda w: torch.dropout(w, 0.0, train=True)), CAUSAL),
    "weights rounded": (written_out(weights=lambda w: w.half().double()), "several dtypes"),
    "weights cast to their own dtype": (written_out(weights=lambda w: w.double()), CAUSAL),
    "scores.where": (written_out(mask=lambda s: s.where(causal(), torch.full((), -1e30).double())), CAUSAL),
    "scores.where of what hides little": (
        written_out(mask=lambda s: s.where(causal(), torch.full((), -5.0).double())),
        "changed in another way",
    ),
    "scores and mask with alpha": (
        written_out(mask=lambda s: torch.add(s, added(), alpha=2)),
        "changed in another way",
    ),
    "mask and scores with alpha": (
        written_out(mask=lambda s: torch.add(added(), s, alpha=0.5)),
        "changed in another way",
    ),
    "scores detached": (written_out(mask=lambda s: s.detach() + added()), "gradients are switched off"),
    "a scale of zero": (written_out(scores=lambda q, k: q @ k.mT * 0.0), "changed in another way"),
}


@pytest.mark.parametrize("spelling", one_in(3, CHAINS))
def test_softmax_between_two_products(spelling):
    fn, expected = CHAINS[spelling]
    assert_as_eager(fn, {} if expected is None else expected)


# -- grad mode


def part_without_gradients(part):
    def fn(query, key, value):
        with torch.set_grad_enabled(part != "scores"):
            scores = (query @ key.mT).masked_fill(~causal(), -1e30)
        with torch.set_grad_enabled(part != "softmax"):
            weights = F.softmax(scores, dim=-1)
        with torch.set_grad_enabled(part not in ("output", "sdpa")):
            out = weights @ value if part != "sdpa" else sdpa(query, key, value, causal())
        return out + query

    return fn


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("scores", "gradients are switched off"),
        ("softmax", "gradients are switched off"),
        ("output", CAUSAL),
        ("sdpa", CAUSAL),
        ("nothing", CAUSAL),
    ],
)
def test_parts_without_gradients(part, expected):
    assert_as_eager(part_without_gradients(part), expected)


def test_all_without_gradients():
    def fn(query, key, value):
        with torch.no_grad():
            out = written_out()(query, key, value)
        return out + query + key + value

    assert_as_eager(fn, CAUSAL)


def test_a_mask_with_a_gradient_is_read_though_it_is_causal():
    bias = torch.zeros(T, T, dtype=torch.float64, requires_grad=True)

    def fn(query, key, value, bias):
        return sdpa(query, key, value, torch.where(causal(), bias * 0, float("-inf")))

    tensors = [*inputs(), bias]
    assert_as_eager(lambda *tensors: fn(*tensors), {"listed": 1}, tensors=tensors)


# -- sizes, scales


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.25, float("inf"), float("nan"), 0.3])
@pytest.mark.parametrize("packed", [False, True])
def test_only_positive_scales_are_taken(scale, packed):
    def make_mask(starts):
        return same(starts.cumsum(-1)) if packed else causal()

    expected = (PACKED if packed else CAUSAL) if scale == 0.3 else "its scale is"
    assert_as_eager(masked_by(make_mask, scale=scale), expected, [STARTS])


@pytest.mark.parametrize(("length", "expected"), [(0, "nothing to attend to"), (1, UNMASKED), (2, CAUSAL)])
def test_few_tokens(length, expected):
    def fn(query, key, value):
        token = torch.arange(query.shape[2])
        return sdpa(query, key, value, token[:, None] >= token)

    assert_as_eager(fn, expected, tensors=inputs(length=length))


def test_results_keep_their_strides():
    def fn(query, key, value):
        query = query.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        return sdpa(query, key, value, causal()).transpose(1, 2).reshape(1, T, -1)

    assert_as_eager(fn, CAUSAL)


def test_integers_are_left_alone():
    def fn(query, key, value):
        numbers = (query.detach() * 3).long()
        scores = (numbers @ numbers.mT).masked_fill(~causal(), -(10**9))
        return scores.double().softmax(-1).long() @ numbers, query + key + value

    assert_as_eager(fn, {})


# -- writes


def mask_written(when):
    def fn(query, key, value, pad):
        mask = causal().clone()
        if when == "before":
            mask.logical_or_(pad[0] > 0)
        out = sdpa(query, key, value, mask)
        if when in ("between", "after"):
            mask[0, 3] = True
        return (out + sdpa(query, key, value, mask), mask) if when == "between" else (out, mask)

    return fn


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("before", Unknown("one of several conditions")),
        ("between", {"causal": 1, "listed": 1}),
        ("after", CAUSAL),
        ("never", CAUSAL),
    ],
)
def test_masks_that_are_written(when, expected):
    assert_as_eager(mask_written(when), expected, [PADDING])


def ids_written(query, key, value, starts):
    ids = starts.cumsum(-1)
    once = sdpa(query, key, value, same(ids))
    ids.zero_()
    return once + sdpa(query, key, value, same(ids)), ids


def padding_written(query, key, value, pad):
    numbers = pad.cumsum(-1)
    mask = causal() & (numbers > 2)[:, None, None]
    numbers.zero_()
    return sdpa(query, key, value, mask)


def value_written(query, key, value):
    value = value.detach() * 1
    scores = query @ key.mT
    value.mul_(2.0)
    return F.softmax(scores.masked_fill(~causal(), -1e30), -1) @ value


def value_written_after_softmax_of_it(query, key, value):
    value = value.detach() * 1
    key = value + 1
    scores = query.detach() @ value.mT
    value.mul_(2.0)
    return F.softmax(scores.masked_fill(~causal(), -1e30), -1) @ key + query


def test_values_have_versions():
    assert_as_eager(ids_written, {"packed": 1, "listed": 1}, [STARTS])
    assert_as_eager(value_written, CAUSAL)


def test_what_was_overwritten_is_not_read():
    assert_as_eager(padding_written, Unknown("is not at hand"), [PADDING])
    assert_as_eager(value_written_after_softmax_of_it, "written in place inside of it")


# -- autocast


def projected(attend, *, inside):
    """Query and key in fp32 again, as rotary embeddings leave them; value as the projection gives it."""

    def fn(x, of_query, of_key, of_value, starts):
        with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
            query, key, value = (F.linear(x, weight) for weight in (of_query, of_key, of_value))
            return attend(query.float(), key.float(), value, same(starts.cumsum(-1)))

    return fn


def exactly(x, of_query, of_key, of_value, starts):
    query, key, value = (F.linear(x, weight) for weight in (of_query, of_key, of_value))
    return sdpa(query, key, value, same(starts.cumsum(-1)))


def softmax_in_fp32(query, key, value, mask):
    scores = (query @ key.mT * 0.25).masked_fill(~mask, float("-inf"))
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


@pytest.mark.parametrize("attend", [sdpa, softmax_in_fp32])
@pytest.mark.parametrize("region", ["around", "inside"])
def test_autocast_around_and_inside(attend, region):
    fn = projected(attend, inside=region == "inside")
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, T, 16), *(torch.randn(16, 16) / 4 for _ in range(3))]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    run = specialized(fn)

    def in_region(call):
        def called(*args):
            with torch.autocast("cpu", torch.bfloat16, enabled=region == "around"):
                return call(*args)

        return called

    wanted, found = (run_as(in_region(call), tensors, [STARTS]) for call in (fn, run.call))
    exact, _ = run_as(exactly, [tensor.detach().double() for tensor in tensors], [STARTS])
    assert counts(run) == PACKED
    assert found[0][0].dtype == wanted[0][0].dtype == torch.bfloat16
    error, error_of_eager = ((out[0][0] - exact[0]).abs().max() for out in (found, wanted))
    assert error <= 2 * error_of_eager
    for got, want in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.abs().max()))


def test_autocast_switched_inside_of_a_chain():
    def fn(query, key, value):
        scores = query @ key.mT
        with torch.autocast("cpu", torch.bfloat16):
            weights = F.softmax(scores.masked_fill(~causal(), -1e30), -1)
        return weights @ value

    tensors = [tensor.detach().float().requires_grad_() for tensor in inputs()]
    assert_as_eager(fn, "autocast is switched", tensors=tensors)


# -- sizes that vary


@pytest.mark.parametrize("first", [0, 1])
def test_padding_of_lengths_that_vary(first):
    def fn(query, key, value, pad):
        query, key, value = (each[:, :, first:] for each in (query, key, value))
        token = torch.arange(query.shape[2])
        return sdpa(query, key, value, (token[:, None] >= token) & (pad > 0)[:, None, None, first:])

    run = specialized(fn, dynamic=True)
    for length in (12, 17, 5):
        tensors, pad = inputs(3, length=length), (torch.rand(3, length) < 0.6).long()
        for found, wanted in zip(run_as(run.call, tensors, [pad]), run_as(fn, tensors, [pad]), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert counts(run) == PACKED
    assert len(run.graphs) == 1
