"""Masks that have a gradient: numbers that are added to the scores, learned or computed; against eager in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.captured import compile_and_keep, count
from tests.passes.specialize_attention.attention import LENGTH, assert_as_eager, counts, inputs, run_as, specialized
from tests.passes.specialize_attention.test_listed_masks import LISTED, biases, random_mask, sdpa, tokens
from tests.slow import one_in

T = LENGTH
mask_blocks = torch.ops.glue.mask_blocks.default


def added(query, key, value, bias):
    return F.softmax(query @ key.transpose(-1, -2) * 0.25 + bias, dim=-1) @ value


def learned(*shape):
    return biases(*shape).requires_grad_()


@pytest.mark.parametrize("eager", one_in(2, [True, False]), ids=["the graph", "compiled"])
@pytest.mark.parametrize("call", [sdpa, added], ids=["sdpa", "written out"])
@pytest.mark.parametrize("shape", [(1, 2, T, T), (T, T), (2, 2, T, T), (2, 1, 1, T), (1, 2, T, 1), (1, 1)])
def test_a_mask_with_a_gradient(call, shape, eager):
    assert_as_eager(call, LISTED, tensors=[*inputs(2), learned(*shape)], eager=eager)


@pytest.mark.parametrize(("call", "is_left"), [(sdpa, False), (added, True)], ids=["sdpa", "written out"])
@pytest.mark.parametrize("is_learned", [True, False])
def test_softmax_written_out_stays_where_its_gradient_is_the_faster_one(call, is_left, is_learned, monkeypatch):
    """As on a GPU; on the CPU nothing is estimated."""
    monkeypatch.setattr(
        "glue_compiler.passes.specialize_attention.analysis.gradient_pays",
        lambda capability, *, is_written_out: not is_written_out,
    )
    bias = learned(2, T, T) if is_learned else biases(2, T, T)
    says = "softmax written out gives it in less time" if is_left and is_learned else LISTED
    assert_as_eager(call, says, tensors=[*inputs(2), bias])


def relative(table, length=T):
    return table[(tokens(length) - tokens(length)[:, None]).clamp(-3, 3) + 3].permute(2, 0, 1)[None]


def hidden(low):
    seen = random_mask(2, T, share=0.6)
    return torch.zeros(2, T, dtype=torch.float64).masked_fill(~seen, low)[:, None, None]


@pytest.mark.parametrize("eager", [True, False], ids=["the graph", "compiled"])
@pytest.mark.parametrize("call", [sdpa, added], ids=["sdpa", "written out"])
@pytest.mark.parametrize("low", one_in(2, [-1e9, torch.finfo(torch.float64).min]), ids=str)
def test_a_bias_of_relative_positions_that_layers_and_others_use(call, low, eager):
    hide = hidden(low)

    def fn(query, key, value, table):
        bias = relative(table)
        padded = bias + hide
        query = call(query, key, value, padded)
        query = call(query, key, value, padded.expand(2, 2, T, T))
        return call(query, key, value, bias), bias.sum()

    assert_as_eager(fn, {"listed": 3}, tensors=[*inputs(2), learned(7, 2)], eager=eager)


def test_equal_masks_keep_their_own_gradients():
    def fn(query, key, value, table):
        first, second = relative(table), relative(table)
        second.register_hook(lambda gradient: gradient * 3)
        return added(added(query, key, value, first), key, value, second)

    assert_as_eager(fn, {"listed": 2}, tensors=[*inputs(), learned(7, 2)])


@pytest.mark.parametrize("cut", ["detach", "no_grad", "data"])
def test_a_part_of_a_mask_without_its_gradient(cut):
    def fn(query, key, value, bias):
        if cut == "no_grad":
            with torch.no_grad():
                same = bias.expand(1, 2, T, T)
        else:
            same = bias.detach() if cut == "detach" else bias.data
        return sdpa(query, key, value, same) + bias.sum()

    assert_as_eager(fn, LISTED, tensors=[*inputs(), learned(T, T)])


@pytest.mark.parametrize("inside", ["attention", "mask"])
def test_a_mask_with_a_gradient_in_a_part_without(inside):
    def fn(query, key, value, bias):
        if inside == "attention":
            mask = bias * 2
            with torch.no_grad():
                out = sdpa(query, key, value, mask)
            return out + sdpa(query, key, value, mask)
        with torch.no_grad():
            mask = bias * 2
        return sdpa(query, key, value, mask) + sdpa(query, key, value, bias * 2)

    assert_as_eager(fn, {"listed": 2}, tensors=[*inputs(), learned(T, T)])


@pytest.mark.parametrize("where", one_in(2, ["outside", "inside"]))
def test_a_mask_with_a_gradient_in_checkpoint_bodies(where):
    def layer(query, key, value, given):
        return added(query, key, value, given if where == "outside" else relative(given))

    def fn(query, key, value, table):
        given = relative(table) if where == "outside" else table
        query = checkpoint(layer, query, key, value, given, use_reentrant=False)
        return checkpoint(layer, query, key, value, given, use_reentrant=False)

    tensors = [*inputs(), learned(7, 2)]
    assert_as_eager(fn, {"listed": 2}, tensors=tensors, eager=False)
    run = compile_and_keep(fn, passes={"specialize_attention": True, "hoist_metadata": True})
    run.call(*tensors)
    assert count(run.graph, mask_blocks) == (1 if where == "outside" else 2)


@pytest.mark.parametrize("call", [sdpa, added], ids=["sdpa", "written out"])
def test_a_mask_with_a_gradient_under_autocast(call):
    def fn(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args)

    torch.manual_seed(0)
    tensors = [tensor.detach().float().requires_grad_() for tensor in (*inputs(), biases(2, T, T))]
    run = specialized(fn, eager=False)
    wanted, found = (run_as(each, tensors, []) for each in (fn, run.call))
    assert counts(run) == LISTED
    assert found[1][3].dtype == torch.float32
    for got, want in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2 * float(want.detach().abs().max()))


@pytest.mark.slow
def test_a_mask_with_a_gradient_of_sizes_that_vary():
    def fn(query, key, value, table):
        return sdpa(query, key, value, relative(table, query.shape[2]))

    run, table = specialized(fn, dynamic=True, eager=False), learned(7, 2)
    for rows, length in ((3, 130), (4, 200)):
        tensors = [*inputs(rows, length=length), table]
        for found, wanted in zip(run_as(run.call, tensors, []), run_as(fn, tensors, []), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert counts(run) == LISTED
    assert len(run.graphs) == 1


def test_a_mask_with_a_gradient_stays_under_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        assert_as_eager(sdpa, "sum in no fixed order", tensors=[*inputs(), learned(T, T)])
    finally:
        torch.use_deterministic_algorithms(False)
