"""Masks, numbers and factors of one attention that are read together; beside near misses, against eager in fp64."""

import pytest
import torch
import torch.nn.functional as F

from tests.captured import count
from tests.passes.specialize_attention.attention import LENGTH, assert_as_eager, counts, inputs, run_as, specialized
from tests.slow import one_in

T = LENGTH
LISTED = {"listed": 1}
INFINITE, LOWEST = float("-inf"), torch.finfo(torch.float64).min
LOW = [INFINITE, LOWEST, -1e30, -1e9]
TOKEN = torch.arange(T)
CAUSAL = TOKEN[:, None] >= TOKEN
"""An input of the graph, as a buffer of a model is: not proved to be causal."""


def some_keys(share=0.5):
    return torch.rand(2, 1, T, T, generator=torch.Generator().manual_seed(0)) < share


def hidden(visible, low=-1e30):
    return torch.where(visible, torch.zeros((), dtype=torch.float64), low)


def alibi(bias=0.0):
    return torch.tensor([0.5, 0.25], dtype=torch.float64)[:, None, None] * (TOKEN - T) + bias


def attention(change):
    """``change``: (scores, visible, bias) → what softmax is taken of."""

    def fn(query, key, value, bias, visible):
        return F.softmax(change(query @ key.mT * 0.25, visible, bias), -1) @ value

    return fn


def without_gradients(fn):
    with torch.no_grad():
        return fn()


MASKS = {
    **{
        f"where {low}, then added {other}": attention(
            lambda s, m, b, low=low, other=other: torch.where(CAUSAL, s, low) + hidden(m, other)
        )
        for low in LOW
        for other in LOW
    },
    **{
        f"numbers added, then filled with {low}": attention(
            lambda s, m, b, low=low: (s + alibi(b)).masked_fill(~m, low)
        )
        for low in LOW
    },
    "numbers that hide added, then filled": attention(
        lambda s, m, b: torch.where(m, s + hidden(CAUSAL, INFINITE), -1e30)
    ),
    "numbers that hide less added, then filled": attention(
        lambda s, m, b: torch.where(m, s + hidden(CAUSAL, -1e9), -1e30)
    ),
    "numbers that hide more added, then filled": attention(lambda s, m, b: torch.where(m, s + hidden(CAUSAL), -1e9)),
    "filled twice": attention(lambda s, m, b: s.masked_fill(~CAUSAL, -1e30).masked_fill(~m, INFINITE)),
    "filled twice, with less first": attention(lambda s, m, b: torch.where(m, s.masked_fill(~CAUSAL, -1e9), LOWEST)),
    "filled three times": attention(
        lambda s, m, b: torch.where(m, s.masked_fill(~CAUSAL, -1e9), LOWEST).masked_fill(TOKEN == 3, -1e30)
    ),
    "filled, then learned numbers added": attention(lambda s, m, b: s.masked_fill(~m, -1e30) + b),
    "learned numbers, filled twice": attention(
        lambda s, m, b: (s + b).masked_fill(~CAUSAL, -1e9).masked_fill(~m, -1e30)
    ),
    "filled in place": attention(lambda s, m, b: s.masked_fill_(~CAUSAL, -1e30).add_(hidden(m))),
    "multiplied by a mask": attention(lambda s, m, b: s * CAUSAL.double() + -1e4 * (1 - CAUSAL.double()) + hidden(m)),
    "multiplied by a boolean mask": attention(lambda s, m, b: s * CAUSAL + hidden(CAUSAL & m)),
    "a mask that is multiplied": attention(lambda s, m, b: CAUSAL.double() * s + hidden(m)),
    "multiplied by small numbers of any sign": attention(
        lambda s, m, b: (s * (CAUSAL.double() * 1.5 - 1.0)).masked_fill(~m, -1e30)
    ),
    "multiplied, then learned numbers, then filled": attention(
        lambda s, m, b: (s * CAUSAL.double() + b).masked_fill(~m, INFINITE)
    ),
    "capped, then multiplied": attention(lambda s, m, b: s.tanh() * CAUSAL.double() + hidden(m)),
    "multiplied, then scaled": attention(lambda s, m, b: s * CAUSAL.double() * 0.5 + hidden(m)),
}


@pytest.mark.parametrize("share", [0.5, 0.15], ids=["no empty rows", "empty rows"])
@pytest.mark.parametrize("name", one_in(4, MASKS))
def test_masks_are_read_together(name, share):
    visible = some_keys(share)
    bias = torch.randn(1, 2, T, T, dtype=torch.float64, requires_grad=True)
    assert_as_eager(lambda *tensors: MASKS[name](*tensors, visible), LISTED, tensors=[*inputs(2), bias])


CHANGED = "changed in another way"
OTHERS = {
    "scaled afterwards": (
        attention(lambda s, m, b: (torch.where(CAUSAL, s, -1e30) + hidden(m)) * 2.0),
        "the scores are scaled afterwards",
    ),
    "hides little": (attention(lambda s, m, b: torch.where(CAUSAL, s, -20.0) + hidden(m)), CHANGED),
    # openai-gpt of transformers has a buffer of ones and zeros, which says nothing of itself.
    "multiplied by an input": (attention(lambda s, m, b: s * b.detach() + hidden(m)), "may be large"),
    "multiplied by places": (attention(lambda s, m, b: s * (TOKEN - 4.0) + hidden(m)), "may be large"),
    "multiplied by a choice of large numbers": (
        attention(lambda s, m, b: s * hidden(CAUSAL) + hidden(m)),
        "may be large",
    ),
    "multiplied by minus infinity": (
        attention(lambda s, m, b: s * hidden(CAUSAL, INFINITE) + hidden(m)),
        "may be large",
    ),
    "factors with a gradient": (attention(lambda s, m, b: s * b + hidden(m)), CHANGED),
    "multiplied after numbers": (
        attention(lambda s, m, b: (s + b) * CAUSAL.double() + hidden(m)),
        "changed in another",
    ),
    "multiplied after the mask": (
        attention(lambda s, m, b: (s + hidden(m)) * (TOKEN + 1.0)),
        CHANGED,
    ),
    "multiplied before a soft cap": (
        attention(lambda s, m, b: (s * CAUSAL.double()).tanh() + hidden(m)),
        CHANGED,
    ),
    "multiplied twice": (
        attention(lambda s, m, b: s * CAUSAL.double() * TOKEN.double() + hidden(m)),
        CHANGED,
    ),
    "multiplied without a mask": (attention(lambda s, m, b: s * CAUSAL.double()), CHANGED),
    "by itself": (attention(lambda s, m, b: s.detach() * s.detach() + hidden(m)), "used elsewhere|by themselves"),
    "by itself without gradients": (attention(lambda s, m, b: s * s.detach() + hidden(m)), "used elsewhere"),
    "added to itself": (attention(lambda s, m, b: (s + s).masked_fill(~m, -1e30)), "by themselves|another way"),
    "filled without gradients": (
        attention(lambda s, m, b: without_gradients(lambda: s.masked_fill(~CAUSAL, -1e30)) + hidden(m)),
        "gradients are switched off|changed in another way",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_such_mask_stays(name):
    fn, expected = OTHERS[name]
    bias = torch.randn(1, 2, T, T, dtype=torch.float64, requires_grad=True)
    visible = some_keys()
    assert_as_eager(lambda *tensors: fn(*tensors, visible), expected, tensors=[*inputs(2), bias])


def test_a_mask_that_is_proved_does_not_hide_that_scores_are_multiplied():
    def fn(query, key, value):
        token = torch.arange(T)
        scores = query @ key.mT * (token % 2 == 0).double()
        return F.softmax(scores.masked_fill(token[:, None] < token, INFINITE), -1) @ value

    assert_as_eager(fn, LISTED)


@pytest.mark.parametrize("join", ["column", "gate"])
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("share", [0.5, 0.15], ids=["no empty rows", "empty rows"])
def test_beside_sinks(join, low, share):
    visible = some_keys(share)

    def fn(query, key, value, sinks):
        scores = torch.where(CAUSAL, query @ key.mT * 0.25, low) + hidden(visible, low)
        if join == "gate":
            out = F.softmax(scores, -1) @ value
            return out * (scores.logsumexp(-1) - sinks[:, None]).sigmoid()[..., None]
        column = sinks[None, :, None, None].expand(2, 2, T, 1)
        return F.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ value

    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    assert_as_eager(fn, LISTED, tensors=[*inputs(2), sinks])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("share", [0.5, 0.15], ids=["no empty rows", "empty rows"])
def test_in_lower_precision(dtype, share):
    """As gpt_neo and mpt have them; numbers of a narrower dtype hold what is filled in for wider scores."""
    low, visible = torch.finfo(dtype).min, some_keys(share)

    def fn(query, key, value):
        scores = torch.where(
            CAUSAL, (query @ key.mT * 0.25).float() + alibi().to(dtype), torch.finfo(torch.float32).min
        )
        scores = scores + torch.where(visible, 0.0, torch.finfo(torch.float32).min)
        first = F.softmax(scores, -1).to(dtype) @ value
        return F.softmax((first @ key.mT + alibi().to(dtype)).masked_fill(~visible, low), -1) @ value

    tensors = [each.detach().to(dtype).requires_grad_() for each in inputs(2)]
    exact = [each.detach().double().requires_grad_() for each in tensors]
    run = specialized(fn)
    wanted, found = (run_as(call, tensors, []) for call in (fn, run.call))
    assert counts(run) == {"listed": 2}
    is_seen = (visible & CAUSAL).any(-1, keepdim=True) & visible.any(-1, keepdim=True)
    for got, want in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        rows = is_seen if dtype == torch.float16 and got.shape == tensors[0].shape else torch.ones((), dtype=torch.bool)
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(got.where(rows, 0), want.where(rows, 0), rtol=tolerance, atol=tolerance)
    assert exact


def test_layers_share_what_is_read_together():
    def fn(query, key, value, bias, causal, visible):
        for _ in range(3):
            scores = torch.where(causal, query @ key.mT * 0.25 + bias, -1e30) + hidden(visible)
            query = F.softmax(scores, -1) @ value
        return query

    run = specialized(fn)
    run.call(*inputs(2), alibi(), CAUSAL, some_keys())
    assert count(run.graph, torch.ops.glue.masked_attention.default) == 3
    assert count(run.graph, torch.ops.glue.mask_blocks.default) == 1


def test_in_a_checkpoint_body():
    def body(query, key, value, causal, hide):
        return F.softmax(torch.where(causal, query @ key.mT * 0.25, LOWEST) + hide, -1) @ value

    def fn(query, key, value, causal, visible):
        hide = hidden(visible)
        for _ in range(2):
            query = torch.utils.checkpoint.checkpoint(body, query, key, value, causal, hide, use_reentrant=False)
        return query

    assert_as_eager(fn, {"listed": 2}, [CAUSAL, some_keys(0.15)], inputs(2), eager=False)


def viewed(use):
    """``use``: (view, scores) → scores; prophetnet of transformers takes the sizes of such a view."""

    def fn(query, key, value, bias):
        scores = query @ key.mT * 0.25
        view = scores.view(2, 2, T, T)
        return F.softmax(use(view, scores) + bias.reshape(1, *view.shape[1:]) + hidden(CAUSAL), -1) @ value

    return fn


VIEWED = {
    "its sizes": (viewed(lambda view, scores: scores), LISTED),
    "its sum, which nothing uses": (viewed(lambda view, scores: (view.sum(), scores)[1]), LISTED),
    "written": (viewed(lambda view, scores: (view.detach().mul_(0.5), scores)[1]), {}),
    "added": (viewed(lambda view, scores: scores + view.sum() * 1e-3), "used elsewhere|changed in another way"),
}


@pytest.mark.parametrize("name", VIEWED)
def test_a_view_of_the_scores_that_nothing_uses(name):
    bias = torch.randn(1, 2, T, T, dtype=torch.float64, requires_grad=True)
    fn, expected = VIEWED[name]
    assert_as_eager(fn, expected, tensors=[*inputs(2), bias])


@pytest.mark.parametrize(("low", "expected"), [(INFINITE, LISTED), (-1e30, "would read 9 bytes for each score")])
def test_what_a_kernel_has_no_room_for_stays(low, expected, monkeypatch):
    """As on a GPU; beside minus infinity the mask itself is read, and not numbers."""
    monkeypatch.setattr("glue_compiler.passes.specialize_attention.listed_masks.most_score_bytes", lambda device: 8)
    visible = some_keys()
    assert_as_eager(
        lambda q, k, v: attention(lambda s, m, b: (s + alibi()).masked_fill(~m, low))(q, k, v, 0, visible),
        expected,
        tensors=inputs(2),
    )
