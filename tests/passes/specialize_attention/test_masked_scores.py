"""Scores that are masked before they are scaled, masked twice, or computed in a wider dtype; beside near misses."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import LENGTH, POSITIONS, assert_as_eager, counts, inputs, specialized
from tests.slow import one_in

CAUSAL, PACKED, LISTED = ({form: 1} for form in ("causal", "packed", "listed"))
STARTS = POSITIONS == 0
LOWEST = torch.finfo(torch.float64).min
KEYS = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5


def causal():
    token = torch.arange(LENGTH)
    return token[:, None] >= token


def documents(starts):
    ids = starts.cumsum(-1)
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal()


def added(visible, low=LOWEST):
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, low)


def less_most(scores, masked, dim=-1):
    """``masked`` less the maximum of ``scores``, as mimo_v2_flash of transformers does."""
    return masked - scores.max(dim=dim, keepdim=True).values


def attention(change):
    """``change``: (scores, starts) → what softmax is taken of."""

    def fn(query, key, value, starts):
        return F.softmax(change(query @ key.mT, starts), -1) @ value

    return fn


UNKNOWN = "changed in another way"
READ_TWICE = "scores are used elsewhere"  # what is subtracted could be a mask, but for being made of the scores
CHANGES = {
    # codegen of transformers divides last.
    "added, then divided": (lambda s, d: (s + added(documents(d))) / 4.0, PACKED),
    "filled, then scaled": (lambda s, d: s.masked_fill(~documents(d), float("-inf")) * 0.25, PACKED),
    "scaled on both sides": (lambda s, d: torch.where(causal(), s * 0.5, -1e30) * 0.5, CAUSAL),
    "capped, masked and scaled": (lambda s, d: ((s / 8).tanh() * 4 + added(causal() & KEYS)) / 2, LISTED),
    "a mask that is read, filled and scaled": (lambda s, d: s.masked_fill(~KEYS, -1e30) / 4.0, LISTED),
    "a mask that is read, added and scaled": (lambda s, d: (s + added(KEYS)) / 4.0, LISTED),
    "two that are read, added and scaled": (lambda s, d: (s + added(KEYS) + s.detach()) / 4.0, UNKNOWN),
    "hidden no more": (lambda s, d: s.masked_fill(~documents(d), -1e10) * 1e-9, UNKNOWN),
    "added and hidden no more": (lambda s, d: (s + added(documents(d), -1e10)) * 1e-9, LISTED),
    "scaled by less than zero": (lambda s, d: s.masked_fill(~documents(d), float("inf")) * -0.25, UNKNOWN),
    "scaled by a tensor": (lambda s, d: s.masked_fill(~documents(d), -1e30) * d.double()[:, None, :, None], UNKNOWN),
    "numbers added, filled, scaled": (
        lambda s, d: (s + torch.arange(LENGTH).double()).masked_fill(~documents(d), -1e30) / 4.0,
        UNKNOWN,
    ),
    # deberta of transformers adds 0 where it has no terms of relative positions.
    "zero added": (lambda s, d: ((s + 0) * 0.25).masked_fill(~documents(d), -1e30), PACKED),
    "zero taken away": (lambda s, d: torch.sub(s * 0.25, 0.0, alpha=2).masked_fill(~documents(d), -1e30), PACKED),
    "one added": (lambda s, d: (s + 1).masked_fill(~documents(d), -1e30), UNKNOWN),
    # gpt_neo of transformers has a mask of its own beside the one that it is passed.
    "where, then added": (lambda s, d: torch.where(causal(), s, LOWEST) + added(documents(d)), PACKED),
    "filled twice": (lambda s, d: s.masked_fill(~causal(), -1e30).masked_fill(~documents(d), float("-inf")), PACKED),
    "filled, added and scaled": (
        lambda s, d: (torch.where(causal(), s, -1e30) + added(documents(d))) / 4.0,
        PACKED,
    ),
    "one of two is read": (lambda s, d: torch.where(causal(), s, -1e30) + added(KEYS), LISTED),
    "one of two is read, and scaled": (
        lambda s, d: (torch.where(causal(), s, -1e30) + added(KEYS)) / 4.0,
        "there are two masks, or sinks beside a finite number, and the scores are scaled afterwards",
    ),
    "one of two hides little": (lambda s, d: torch.where(causal(), s, -20.0) + added(documents(d)), UNKNOWN),
    "less the maximum": (lambda s, d: less_most(t := s.masked_fill(~documents(d), -1e30), t), PACKED),
    "less the maximum where some see nothing": (
        lambda s, d: (t := torch.where(KEYS.roll(1, -1) & causal(), s, float("-inf"))) - t.amax(-1, keepdim=True),
        LISTED,
    ),
    "less the maximum of all": (lambda s, d: less_most(s, s.masked_fill(~documents(d), -1e30)), READ_TWICE),
    "less the maximum over queries": (lambda s, d: less_most(t := s + added(documents(d)), t, dim=-2), READ_TWICE),
    "less the mean": (lambda s, d: (t := s + added(causal(), -1e9)) - t.mean(-1, keepdim=True), READ_TWICE),
    "added twice": (lambda s, d: s + added(causal()) + added(documents(d)), LISTED),
    "added three times": (lambda s, d: s + added(causal()) + added(documents(d)) + added(KEYS), UNKNOWN),
}


@pytest.mark.parametrize("name", one_in(3, CHANGES))
def test_scores_are_masked(name):
    change, expected = CHANGES[name]
    assert_as_eager(attention(change), expected, [STARTS])


# -- in place


def filled_in_place(query, key, value, starts):
    """As flaubert and xlm of transformers do."""
    scores = query @ key.mT
    scores.masked_fill_(~documents(starts), LOWEST)
    return F.softmax(scores.float() if scores.dtype == torch.float16 else scores, -1) @ value


def expanded_to_scores(hidden, before=lambda mask, scores: mask.expand_as(scores)):
    """As flaubert and xlm of transformers do, with ``float`` and ``type_as`` that do nothing here."""

    def fn(query, key, value, starts):
        scores = query @ key.mT
        mask = before(hidden(starts), scores)
        scores.masked_fill_(mask, LOWEST)
        return F.softmax(scores.double(), -1).type_as(scores) @ value

    return fn


def expanded_and_returned(query, key, value, starts):
    scores = query @ key.mT
    mask = (~documents(starts)).expand_as(scores)
    return F.softmax(scores.masked_fill(mask, LOWEST), -1) @ value, mask


def expanded_for_rows(query, key, value, starts):
    scores = query @ key.mT
    ids = starts.cumsum(-1)
    seen = ids[:, None, :, None] == ids[:, None, None, :]
    token = torch.arange(starts.shape[1])
    mask = (~(seen & (token[:, None] >= token))).expand_as(scores)
    return F.softmax(scores.masked_fill(mask, -1e30), -1) @ value, mask


def expanded_for_two(query, key, value, starts):
    scores = query @ key.mT
    mask = (~KEYS).expand_as(scores).contiguous()
    first = F.softmax(scores.masked_fill(mask, LOWEST), -1) @ value
    return F.softmax((first @ key.mT).masked_fill(mask, LOWEST), -1) @ value


def expanded_to_a_maximum(query, key, value, starts):
    scores = (query @ key.mT).masked_fill(~documents(starts), LOWEST)
    most = scores.amax(-1, keepdim=True)
    return F.softmax(scores - most, -1) @ value, starts[:, None, :, None].expand_as(most)


def scores_expanded(query, key, value, starts):
    scores = query @ key.mT
    return F.softmax(scores.masked_fill(~documents(starts), LOWEST), -1) @ value, scores.expand_as(scores[None])


def all_in_place(query, key, value, starts):
    scores = query @ key.mT
    scores /= 4.0
    scores *= 0.5
    scores += added(documents(starts), -1e30)
    return F.softmax(scores, -1) @ value


def written_and_read(query, key, value, starts):
    scores = query @ key.mT
    first = scores[..., 0]
    scores.masked_fill_(~documents(starts), -1e30)
    return F.softmax(scores, -1) @ value + first[..., None]


def scores_added_to_the_mask(query, key, value, starts):
    mask = added(documents(starts), -1e30).expand(1, 2, LENGTH, LENGTH).contiguous()
    result = F.softmax(mask.add_(query @ key.mT), -1) @ value
    return result, mask * 2


def filled_without_gradients(query, key, value, starts):
    scores = query @ key.mT
    with torch.no_grad():
        scores.masked_fill_(~documents(starts), -1e30)
    return F.softmax(scores, -1) @ value


def written_between_the_products(query, key, value, starts):
    scores = query.detach() @ key.detach().mT
    weights = F.softmax(scores.masked_fill_(~documents(starts), -1e30), -1)
    return weights.mul_(2) @ value


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (filled_in_place, PACKED),
        (expanded_to_scores(lambda starts: ~documents(starts)), PACKED),
        (expanded_to_scores(lambda starts: ~KEYS), LISTED),
        (expanded_to_scores(lambda starts: ~KEYS, lambda mask, scores: mask.expand_as(other=scores)), LISTED),
        (expanded_to_scores(lambda starts: ~KEYS, lambda mask, scores: mask | (scores > 4)), "used elsewhere"),
        (expanded_and_returned, PACKED),
        (expanded_to_a_maximum, "used elsewhere"),
        (expanded_for_two, {"listed": 2}),
        (scores_expanded, "used elsewhere"),
        (all_in_place, PACKED),
        (written_and_read, "used elsewhere"),
        (scores_added_to_the_mask, {}),
        (filled_without_gradients, {}),
        (written_between_the_products, {}),
    ],
)
def test_scores_are_masked_in_place(fn, expected):
    assert_as_eager(fn, expected, [STARTS])


def test_a_mask_expanded_to_scores_of_any_size():
    assert_as_eager(expanded_for_rows, PACKED, [STARTS.expand(3, -1)], inputs(batch=3), dynamic=True)


# -- computed in a wider dtype than that of query, key and value


def widened(query, key, value, starts):
    """As gptj and others of transformers keep scores of fp16 from overflowing."""
    scores = query.double() @ key.double().mT * 0.25
    return F.softmax(scores.masked_fill(~documents(starts), -1e30), -1).to(value.dtype) @ value


def repeated_and_widened(query, key, value, starts):
    key, value = (each[:, :2].repeat_interleave(2, 1) for each in (key, value))
    return widened(query, key, value, starts)


def widened_value(query, key, value, starts):
    scores = query.double() @ key.double().mT * 0.25
    return F.softmax(scores.masked_fill(~documents(starts), -1e30), -1) @ value.double()


def narrowed(query, key, value, starts):
    scores = (query.bfloat16() @ key.bfloat16().mT).float() * 0.25
    return F.softmax(scores.masked_fill(~documents(starts), -1e30), -1) @ value


def widened_without_gradients(query, key, value, starts):
    with torch.no_grad():
        wider = query.double()
    scores = wider @ key.double().mT * 0.25
    return F.softmax(scores.masked_fill(~documents(starts), -1e30), -1).to(value.dtype) @ value


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (widened, PACKED),
        (repeated_and_widened, PACKED),
        (widened_value, PACKED),
        (narrowed, {}),
        (widened_without_gradients, {}),
    ],
)
def test_what_is_computed_in_a_wider_dtype(fn, expected):
    tensors = [each.detach().float().requires_grad_() for each in inputs(1, 4, 4)]
    found = []
    run = specialized(fn)
    for call in (fn, run.call):
        copies = [each.detach().clone().requires_grad_() for each in tensors]
        out = call(*copies, STARTS)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        found.append([out, *(each.grad for each in copies)])
    assert counts(run) == expected
    for want, got in zip(*found, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            assert want.dtype == got.dtype
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# -- numbers that are filled in, and the dtype that is to hold them

FILLED_IN_HALF = {
    "masked_fill, too large": (lambda s, m: s.masked_fill(~m, -1e30), "refused"),
    "a tensor, too large": (lambda s, m: s.masked_fill(~m, torch.tensor(-1e30, dtype=torch.float32)), "refused"),
    "masked_fill": (lambda s, m: s.masked_fill(~m, -65504.0), CAUSAL),
    "where rounds": (lambda s, m: torch.where(m, s, -1e30), CAUSAL),
}


@pytest.mark.parametrize("name", FILLED_IN_HALF)
def test_what_eager_cannot_fill_in_is_not_taken_away(name):
    fill, expected = FILLED_IN_HALF[name]

    def fn(query, key, value):
        return F.softmax(fill(query @ key.mT, causal()), -1) @ value

    tensors = [each.detach().half() for each in inputs()]
    run = specialized(fn)
    if expected == "refused":
        for call in (fn, run.call):
            with pytest.raises(RuntimeError, match="without overflow"):
                call(*tensors)
        assert counts(run) == {}
    else:
        torch.testing.assert_close(run.call(*tensors), fn(*tensors), rtol=1e-2, atol=1e-2)
        assert counts(run) == expected


def test_a_choice_by_a_number_that_an_element_chose():
    """A number that is 0 or 1, as one element of a tensor says, is compared: no symbol is in that."""
    lengths = torch.tensor([3])

    def fn(query, key, value, lengths):
        seen = lengths.unsqueeze(1).bool().long() > torch.arange(LENGTH)
        bias = torch.where(causal() & seen[:, None, None], torch.zeros((), dtype=query.dtype), float("-inf"))
        return F.softmax((query @ key.mT) * 0.25 + bias, -1) @ value

    assert_as_eager(fn, LISTED, [lengths], [each.detach()[:1].requires_grad_() for each in inputs()])
