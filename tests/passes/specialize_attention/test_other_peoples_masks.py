"""Masks of packed batches as training code out there builds them, each in words of its own; beside near misses."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.specialize_attention.attention import LENGTH, assert_as_eager, attention, inputs
from tests.slow import one_in

END = 7
TOKENS = torch.tensor([[1, 2, END, 3, 4, 5, END, 6, 1, 1, 2, 3]])
PACKED, LISTED = {"packed": 1}, {"listed": 1}


def causal():
    token = torch.arange(LENGTH)
    return token[:, None] >= token


def within(ids):
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal()


def starts(tokens):
    return (tokens == 1).cumsum(-1)


def ends(tokens):
    return (tokens == END).cumsum(1)


def moved(first):
    """Ids of documents that their last token ends, behind ``first``."""
    return lambda t: within(torch.cat([first(t[:, :1]), ends(t)[:, :-1]], 1))


def padded(*pad, value=None):
    return lambda t: within(F.pad(ends(t)[:, :-1], pad, value=value))


def in_place(tokens):
    ids = torch.zeros_like(tokens)
    ids[:, 1:] = ends(tokens)[:, :-1]
    return within(ids)


def since_the_start(tokens):
    token = torch.arange(LENGTH)
    start = torch.where(tokens == 1, token, 0).cummax(1).values
    return (token[None, :] >= start[:, :, None])[:, None] & causal()


PROVED = {
    "ids of a first token": lambda t: within(starts(t)),
    "moved by cat": moved(torch.zeros_like),
    "moved by cat behind less": moved(lambda t: torch.full_like(t, -3)),
    "moved by pad": padded(1, 0),
    "moved by pad behind less": padded(1, 0, value=-1),
    "ends moved by cat, then counted": lambda t: within(
        torch.cat([torch.zeros_like(t[:, :1], dtype=torch.bool), (t == END)[:, :-1]], 1).cumsum(1)
    ),
    "ends moved by pad, then counted": lambda t: within(F.pad(t[:, :-1] == END, (1, 0)).cumsum(1)),
    "ends rolled, then counted": lambda t: within((t == END).roll(1, 1).cumsum(1)),
    "tril times equality": lambda t: (
        torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.long))
        * (starts(t)[:, None, :, None] == starts(t)[:, None, None, :])
    ).bool(),
    "added, the least number": lambda t: torch.where(within(starts(t)), 0.0, torch.finfo(torch.float32).min).double(),
    "one minus the mask": lambda t: (1.0 - within(starts(t)).double()) * -1e30,
    "lengths as a list, repeated": lambda t: within(
        torch.repeat_interleave(torch.arange(3), torch.tensor([3, 4, 5]))[None]
    ),
    "offsets as a list, bucketized": lambda t: within(
        torch.bucketize(torch.arange(LENGTH), torch.tensor([3, 7, 12]), right=True)[None]
    ),
    "not triu": lambda t: ~torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1) & within(starts(t)),
    "difference is zero": lambda t: ((starts(t)[:, :, None] - starts(t)[:, None, :]) == 0)[:, None] & causal(),
    "not unequal": lambda t: ~(starts(t)[:, :, None] != starts(t)[:, None, :])[:, None] & causal(),
}
READ = {
    "ends counted up to the token before": lambda t: within(ends(t) - (t == END).long()),
    "ends counted from behind": lambda t: within((t == END).long().flip(1).cumsum(1).flip(1)),
    "ids assigned": in_place,
    "lengths as a list, block_diag": lambda t: torch.block_diag(*(torch.ones(n, n) for n in (3, 4, 5))).tril().bool(),
    "keys since the start": since_the_start,
    # These ids are not sorted, or not proved to be.
    "moved behind more": moved(torch.ones_like),
    "moved behind tokens": moved(lambda t: t * 0 - t),
    "padded with more": padded(1, 0, value=1),
    "padded at the end": padded(0, 1),
    "padded on both sides": lambda t: within(F.pad(ends(t)[:, 1:-1], (1, 1))),
    "counts of tokens, moved": lambda t: within(F.pad((t - 3).cumsum(1)[:, :-1], (1, 0))),
    "counts of columns, moved": lambda t: within(F.pad((t == END).cumsum(0)[:, :-1], (1, 0))),
}


@pytest.mark.parametrize("name", one_in(3, PROVED))
def test_masks_that_are_proved(name):
    assert_as_eager(attention(PROVED[name]), PACKED, [TOKENS], inputs())


@pytest.mark.parametrize("name", one_in(3, READ))
def test_masks_that_are_read(name):
    assert_as_eager(attention(READ[name]), LISTED, [TOKENS], inputs())
