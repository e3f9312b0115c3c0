"""What infinities, NaN, queries without keys and gradients of zeros tell apart, beside near misses; against eager."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import LENGTH, assert_as_eager, counts, inputs, specialized

T = LENGTH
LISTED = {"listed": 1}
INF = float("-inf")
TOKEN = torch.arange(T)
CAUSAL = TOKEN[:, None] >= TOKEN


def some_keys(*, empty=False):
    shown = torch.rand(1, 1, T, T, generator=torch.Generator().manual_seed(0)) < 0.5
    shown |= torch.eye(T, dtype=torch.bool)
    shown[..., 2, :] &= not empty
    return shown


def attend(change, weigh=lambda weights, shown: weights):
    return lambda q, k, v, shown, *others: weigh(F.softmax(change(q @ k.mT * 0.25, shown, *others), -1), shown) @ v


def merged(tensor):
    return tensor.flatten(0, 1)


def added_by_baddbmm(add, **settings):
    def fn(q, k, v, shown, bias):
        scores = torch.baddbmm(add(bias), merged(q), merged(k).mT, **settings).view(1, 2, T, T)
        return F.softmax(scores.masked_fill(~shown, INF), -1) @ v

    return fn


# -- factors


def zeros(weights, shown):
    return weights.masked_fill(~shown, 0.0)


@pytest.mark.parametrize("low", [INF, -1e30])
@pytest.mark.parametrize("empty", [False, True])
def test_zeros_in_the_weights_of_multiplied_scores(low, empty):
    fn = attend(lambda s, m: (s * (TOKEN < 6)).masked_fill(~m, low), zeros)
    assert_as_eager(fn, "scores are multiplied before they are masked", [some_keys(empty=empty)])
    assert_as_eager(attend(lambda s, m: s.masked_fill(~m, low), zeros), LISTED, [some_keys(empty=empty)])


FACTORS = {
    "boolean": lambda s: s * (TOKEN < 6),
    "numbers": lambda s: s * torch.where(TOKEN < 6, 1.0, -0.5),
}


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("low", [INF, -1e30])
def test_a_hidden_key_that_is_not_finite(poison, factors, low):
    query, key, value = inputs()
    key = key.detach().clone()
    key[:, :, 5] = poison
    key.requires_grad_()
    shown = some_keys()
    shown[..., 5] = False
    shown[..., 0] = True
    fn = attend(lambda s, m: FACTORS[factors](s).masked_fill(~m, low))
    assert_as_eager(fn, LISTED, [shown], [query, key, value])


def test_a_shown_key_that_is_not_finite_times_false():
    query, key, value = inputs()
    key = key.detach().clone()
    key[:, :, 5] = math.inf
    fn = attend(lambda s, m: (s * (TOKEN != 5)) + m.double())
    assert_as_eager(fn, LISTED, [some_keys()], [query, key, value])


# -- tests for NaN

OF_ONE = {
    "equal": lambda x: x == x,
    "no greater": lambda x: x <= x,
    "no less": lambda x: x >= x,
    "not unequal": lambda x: ~(x != x),
    "a difference": lambda x: x - x == 0,
    "a product": lambda x: x * 0 == 0,
}


@pytest.mark.parametrize("test", OF_ONE)
def test_numbers_that_are_compared_with_themselves(test):
    shows = OF_ONE[test]
    numbers = torch.randn(1, 1, 1, T)
    numbers[..., 5:] = math.nan
    called = lambda q, k, v, x: F.scaled_dot_product_attention(q, k, v, attn_mask=shows(x))  # noqa: E731
    written = lambda q, k, v, x: F.softmax((q @ k.mT).masked_fill(~shows(x), INF), -1) @ v  # noqa: E731
    assert_as_eager(called, {"packed": 1}, [numbers])  # as padding
    assert_as_eager(written, LISTED, [numbers])
    # Integers are finite.
    assert_as_eager(called, {"unmasked": 1}, [torch.arange(T).view(1, 1, 1, T)])


ZEROS = {
    "a product": lambda b: b * 0,
    "a product of another order": lambda b: 0.0 * b,
    "a difference": lambda b: b - b,
}


@pytest.mark.parametrize("made", ZEROS)
def test_zeros_of_what_is_infinite(made):
    fn = added_by_baddbmm(ZEROS[made])
    bias = torch.zeros(2, T, T, dtype=torch.float64)
    bias[0, :, 0] = math.inf
    assert_as_eager(fn, LISTED, [some_keys(), bias])
    assert_as_eager(added_by_baddbmm(torch.zeros_like), LISTED, [some_keys(), bias])


# -- what is added


@pytest.mark.parametrize("is_learned", [False, True])
def test_what_is_not_read_and_learned(is_learned):
    bias = torch.randn(2, T, T, dtype=torch.float64, requires_grad=is_learned)
    fn = lambda q, k, v, b, m: added_by_baddbmm(lambda b: b, beta=0)(q, k, v, m, b)  # noqa: E731
    expected = "a gradient of zeros" if is_learned else LISTED
    assert_as_eager(fn, expected, [some_keys()], [*inputs(), bias])


ROUNDED = {
    "to bfloat16": (torch.bfloat16, torch.float32, "rounded to torch.bfloat16"),
    "to float16": (torch.float16, torch.float32, "rounded to torch.float16"),
    "not at all": (torch.float32, torch.float32, LISTED),
    "as the bias": (torch.bfloat16, torch.bfloat16, LISTED),
}


@pytest.mark.parametrize("case", ROUNDED)
def test_a_bias_that_is_rounded(case):
    dtype, of_bias, expected = ROUNDED[case]
    bias = torch.zeros(1, 1, T, T, dtype=of_bias)
    bias[..., 3, :] = torch.finfo(torch.float32).min if expected is not LISTED else -8.0
    fn = lambda q, k, v, m, b: F.softmax((q @ k.mT + b).to(dtype).masked_fill(~m, INF), -1) @ v.to(dtype)  # noqa: E731
    tensors = [each.detach().to(dtype).requires_grad_() for each in inputs()]
    if expected is LISTED:
        run = specialized(fn)
        torch.testing.assert_close(
            run.call(*tensors, some_keys(), bias), fn(*tensors, some_keys(), bias), rtol=5e-2, atol=5e-2
        )
        assert counts(run) == LISTED
    else:
        assert_as_eager(fn, expected, [some_keys(), bias], tensors)


# -- sinks


def column(q, k, v, sinks, shown, low):
    scores = (q @ k.mT).masked_fill(~shown, low)
    return F.softmax(torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, 2, T, 1)], -1), -1)[..., :-1] @ v


def gated(q, k, v, sinks, shown, low):
    scores = (q @ k.mT).masked_fill(~shown, low)
    left = (scores.logsumexp(-1) - sinks.view(1, -1, 1)).sigmoid()
    return F.softmax(scores, -1) @ v * left[..., None]


@pytest.mark.parametrize("form", [column, gated])
@pytest.mark.parametrize("low", [INF, -1e9])
@pytest.mark.parametrize("least", [INF, -1e30, -1e9, 0.5])
def test_sinks_of_queries_without_keys(form, low, least):
    sinks = torch.tensor([least, 0.25], dtype=torch.float64, requires_grad=True)
    fn = lambda q, k, v, s, m: form(q, k, v, s, m, low)  # noqa: E731
    assert_as_eager(fn, LISTED, [some_keys(empty=True)], [*inputs(), sinks])


def test_one_sink_for_all_heads():
    def fn(q, k, v, sink, shown):
        scores = (q @ k.mT).masked_fill(~shown, INF)
        return F.softmax(scores, -1) @ v * (scores.logsumexp(-1) - sink).sigmoid()[..., None]

    for shape, expected in (((), "one number for all heads"), ((1,), LISTED)):
        sink = torch.full(shape, 0.5, dtype=torch.float64, requires_grad=True)
        assert_as_eager(fn, expected, [some_keys()], [*inputs(), sink])
    token = torch.arange
    assert_as_eager(
        lambda q, k, v, sink: fn(q, k, v, sink, token(q.shape[2])[:, None] >= token(k.shape[2])),
        {"packed": 1},
        tensors=[*inputs(), sink],
    )
