"""Masks that are copied to whole blocks, for lengths that kernels do not know for multiples of them; near misses."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from glue_compiler.ops.mask_blocks import whole_blocks_pay
from glue_compiler.passes.specialize_attention import rewrite
from tests.captured import count
from tests.passes.specialize_attention.attention import LENGTH, assert_as_eager, inputs, run_as, specialized

T = LENGTH
LOWEST = torch.finfo(torch.float64).min
WHOLE = torch.ops.glue.mask_in_whole_blocks.default
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def short_ones_too(monkeypatch):
    monkeypatch.setattr(rewrite, "whole_blocks_pay", lambda queries, keys, device: True)


def shown(*shape):
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[..., 0, :] = False  # a query that sees no key
    return mask


def numbers(low):
    return torch.zeros(2, 1, T, T, dtype=torch.float64).masked_fill(~shown(2, 1, T, T), low)


def sdpa(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def written_out(query, key, value, mask):
    return F.softmax(query @ key.mT * 0.25 + mask[..., :T], -1) @ value


def filled(query, key, value, mask):
    return F.softmax((query @ key.mT * 0.25).masked_fill(~mask, float("-inf")), -1) @ value


def beside_sinks(query, key, value, mask):
    scores = query @ key.mT * 0.25 + mask
    column = mask.new_tensor([0.5, -1.0])[None, :, None, None].expand(2, 2, T, 1)
    return F.softmax(torch.cat([scores, column], -1), -1)[..., :T] @ value


def in_a_checkpoint(query, key, value, mask):
    return checkpoint(sdpa, query, key, value, mask, use_reentrant=False)


TAKEN = {
    "booleans": (sdpa, shown(2, 1, T, T)),
    "booleans of all rows": (sdpa, shown(T, T)),
    "booleans of queries": (sdpa, shown(2, 1, T, 1)),
    "booleans of heads": (sdpa, shown(2, 2, T, T)),
    "filled with minus infinity": (filled, shown(2, 1, T, T)),
    "numbers": (sdpa, numbers(float("-inf"))),
    "numbers that are finite": (written_out, numbers(LOWEST)),
    "numbers of no mask": (written_out, torch.randn(2, 1, T, T, dtype=torch.float64)),
    "a part of a longer mask": (written_out, torch.randn(1, 1, T, 30, dtype=torch.float64)),
    "beside sinks": (beside_sinks, numbers(LOWEST)),
    "in a checkpoint": (in_a_checkpoint, numbers(LOWEST)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_masks_in_whole_blocks(name):
    fn, mask = TAKEN[name]
    assert_as_eager(fn, {"listed": 1}, [mask], inputs(2))
    run = specialized(fn)
    run_as(run.call, inputs(2), [mask])
    assert count(run.graph, WHOLE) == 1


def test_layers_share_the_copy():
    def fn(query, key, value, mask):
        return sdpa(sdpa(query, key, value, mask), key, value, mask)

    assert_as_eager(fn, {"listed": 2}, [shown(2, 1, T, T)], inputs(2))
    run = specialized(fn)
    run_as(run.call, inputs(2), [shown(2, 1, T, T)])
    assert count(run.graph, WHOLE) == 1


def test_one_graph_serves_multiples_of_128_and_others():
    run = specialized(sdpa, dynamic=True)
    for length in (130, 128, 256, 300):
        tensors = inputs(2, length=length)
        mask = torch.ones(length, length, dtype=torch.bool).tril(3)
        with torch._dynamo.config.patch(error_on_recompile=length != 130):
            for got, want in zip(run_as(run.call, tensors, [mask]), run_as(sdpa, tensors, [mask]), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert count(run.graph, WHOLE) == 1


def filled_with_a_number(query, key, value, mask):
    return F.softmax((query @ key.mT * 0.25).masked_fill(~mask, LOWEST), -1) @ value


def beside_a_bias(query, key, value, mask):
    return F.softmax((query @ key.mT * 0.25 + torch.sin(key[..., :T])).masked_fill(~mask, float("-inf")), -1) @ value


def multiplied(query, key, value, mask):
    scores = query @ key.mT * 0.25
    return F.softmax(torch.where(mask, scores, LOWEST) + torch.where(mask, 0.0, -1e30), -1) @ value


@pytest.mark.parametrize("fn", [filled_with_a_number, beside_a_bias, multiplied])
def test_what_reads_more_than_one_mask_or_takes_a_mean_stays(fn):
    mask = shown(2, 1, T, T)
    assert_as_eager(fn, {"listed": 1}, [mask], inputs(2))
    run = specialized(fn)
    run_as(run.call, inputs(2), [mask])
    assert count(run.graph, WHOLE) == 0


def test_numbers_with_a_gradient_stay():
    tensors = [*inputs(2), torch.randn(2, 1, T, T, dtype=torch.float64, requires_grad=True)]
    assert_as_eager(sdpa, {"listed": 1}, tensors=tensors)
    run = specialized(sdpa)
    run_as(run.call, tensors, ())
    assert count(run.graph, WHOLE) == 0


@pytest.mark.parametrize(
    ("queries", "keys", "device", "pays"),
    [
        (2000, 2000, CUDA, True),
        (2048, 2048, CUDA, False),
        (2000, 2001, CUDA, False),
        (1, 2000, CUDA, False),
        (300, 300, CUDA, False),
        (40000, 40000, CUDA, False),
        (2000, 2000, torch.device("cpu"), False),
    ],
)
def test_what_pays(queries, keys, device, pays):
    assert whole_blocks_pay(queries, keys, device) is pays


@pytest.mark.parametrize(("gib", "queries", "pays"), [(24, 16_000, True), (24, 20_000, False), (80, 20_000, True)])
def test_a_second_mask_takes_no_more_of_a_small_card(monkeypatch, gib, queries, pays):
    monkeypatch.setattr(sys.modules[whole_blocks_pay.__module__], "size_of", lambda device: gib * 2**30)
    assert whole_blocks_pay(queries - 1, queries - 1, CUDA) is pays
