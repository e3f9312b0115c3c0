"""What is known at once, what stays deferred, and what is computed when somebody reads it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional

from glue_compiler.compat import wrapper_tensors
from glue_compiler.deferred import values
from glue_compiler.deferred.head import Elementwise, Head, Term
from glue_compiler.deferred.tensor import DeferredTensor, defer
from tests.deferred.logits import ADAPTED, CAPPED, PLAIN, WORDS, Operands, assert_same_gradients, is_deferred

HEADS = {"plain": PLAIN, "capped": CAPPED, "adapted": ADAPTED}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_looks_like_the_logits(dtype):
    operands = Operands(dtype=dtype)
    logits, expected = operands.deferred(), operands.eager()
    assert (logits.shape, logits.stride(), logits.storage_offset()) == (expected.shape, expected.stride(), 0)
    assert (logits.dtype, logits.device, logits.layout) == (expected.dtype, expected.device, expected.layout)
    assert (logits.requires_grad, logits.is_leaf, logits.grad_fn is None) == (True, False, False)
    assert (logits.numel(), logits.dim(), len(logits), logits.is_contiguous()) == (110, 3, 2, True)
    assert logits.type() == expected.type()
    assert is_deferred(logits)


def test_without_gradients_it_needs_none():
    operands = Operands()
    with torch.no_grad():
        logits = operands.deferred()
    assert (logits.requires_grad, logits.is_leaf, logits.grad_fn) == (False, True, None)
    frozen = Operands(requires_grad=False).deferred()
    assert not frozen.requires_grad


STAYS = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.bfloat16),
    "to with device": lambda x: x.to("cpu", torch.float16),
    "to a copy": lambda x: x.to(torch.float64, copy=True),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "view_as": lambda x: x.view_as(x),
    "flatten rows": lambda x: x.view(-1, WORDS),
    "reshape": lambda x: x.reshape(5, 2, WORDS),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "last row": lambda x: x[:, -1],
    "shift": lambda x: x[..., :-1, :],
    "shift, copied": lambda x: x[..., :-1, :].contiguous().view(-1, WORDS),
    "shift, reshaped": lambda x: x[..., :-1, :].reshape(-1, WORDS),
    "shift, cast": lambda x: x[..., :-1, :].float(),
    "steps": lambda x: x[:, ::2],
    "narrow": lambda x: x.narrow(1, 1, 3),
    "transposed rows": lambda x: x.transpose(0, 1),
    "repeated rows": lambda x: x[:, :1].expand(2, 4, WORDS),
    "split": lambda x: x.split(2, dim=1)[1],
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "row of a row": lambda x: x[1][3],
    "iteration": lambda x: list(x)[1],
    "overlapping rows": lambda x: x.as_strided((2, 4, 2, WORDS), (5 * WORDS, WORDS, WORDS, 1)),
    "index": lambda x: x[torch.tensor([1, 0])],
    "index of rows": lambda x: x[:, torch.tensor([1, 4, 1])],
    "index of both": lambda x: x[torch.tensor([1, 0]), torch.tensor([3, 3])],
    "mask": lambda x: x[torch.tensor([[True, False, True, False, False], [False] * 5])],
    "mask of nothing": lambda x: x.view(-1, WORDS)[torch.zeros(10, dtype=torch.bool)],
    "index_select": lambda x: x.index_select(-2, torch.tensor([2, 0])),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", STAYS)
def test_what_picks_rows_casts_or_copies_stays_deferred(name, head):
    operands = Operands(head)
    logits, eager = operands.deferred(), operands.eager()
    result, expected = STAYS[name](logits), STAYS[name](eager)
    assert is_deferred(result)
    assert is_deferred(logits)
    assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert result.requires_grad == expected.requires_grad
    read = result + 0
    assert type(read) is torch.Tensor
    torch.testing.assert_close(read, expected + 0, rtol=1e-12, atol=1e-12)
    assert read.stride() == (expected + 0).stride()
    if expected.requires_grad:
        assert_same_gradients(result, expected, operands)


COMPUTES = {
    "words": lambda x: x[..., 3:5],
    "one word": lambda x: x[..., 0],
    "transposed": lambda x: x.mT,
    "all in one": lambda x: x.view(-1),
    "split words": lambda x: x.view(2, 5, WORDS, 1),
    "bits": lambda x: x.detach().view(torch.int64),
    "windows": lambda x: x.unfold(1, 2, 2),
    "shifted by a word": lambda x: x.as_strided((9, WORDS), (WORDS, 1), 1),
    "sum": lambda x: x.sum(),
    "softmax": lambda x: x.softmax(-1),
    "loss": lambda x: functional.cross_entropy(x.view(-1, WORDS), torch.arange(10)),
    "gather": lambda x: x.log_softmax(-1).gather(-1, torch.zeros(2, 5, 1, dtype=torch.int64)),
    "index of words": lambda x: x[:, :, torch.tensor([1, 2])],
    "mask of numbers": lambda x: x[x > 0],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "cat": lambda x: torch.cat([x, x[:, :1]], dim=1),
    "stack": lambda x: torch.stack([x[:, 0], x[:, 1]]),
    "integers": lambda x: (x * 10).detach().to(torch.int64),
    "cast to integers": lambda x: x.detach().to(torch.int64),
    "topk": lambda x: x.topk(3).values,
    "item": lambda x: torch.tensor(x[0, 0].max().item()),
    "comparison": lambda x: torch.tensor(torch.equal(x, x.clone())),
    "two of them": lambda x: x @ x.mT,
    "product with it": lambda x: torch.ones(3, 2, 5, WORDS, dtype=x.dtype) * x,
    "einsum": lambda x: torch.einsum("btv,btv->bt", x, x),
}


@pytest.mark.parametrize("name", COMPUTES)
def test_everything_else_computes_the_values(name):
    operands = Operands(CAPPED)
    logits = operands.deferred()
    result, expected = COMPUTES[name](logits), COMPUTES[name](operands.eager())
    assert not is_deferred(result)
    assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert type(result + 0) is torch.Tensor
    assert result.requires_grad == expected.requires_grad
    if expected.requires_grad:
        assert_same_gradients(result, expected, operands)


def _count_rows(monkeypatch) -> list[int]:
    counted: list[int] = []
    logits = Head.logits

    def count(self, rows, *args):
        counted.append(rows[0].numel() // rows[0].shape[-1])
        return logits(self, rows, *args)

    monkeypatch.setattr(Head, "logits", count)
    return counted


def test_one_row_that_is_read_is_one_row_computed(monkeypatch):
    logits = Operands().deferred()
    counted = _count_rows(monkeypatch)
    logits[0, -1].argmax()
    logits[:, -1] + 0
    assert counted == [1, 2]


def test_all_is_computed_once(monkeypatch):
    logits = Operands().deferred()
    counted = _count_rows(monkeypatch)
    rows = logits[:, -1]
    logits.sum()
    logits.exp()
    logits.detach().view(-1, WORDS).sum()
    rows.sum()
    logits.float()
    assert counted == [10]


def test_threads_compute_it_once(monkeypatch):
    operands = Operands(CAPPED, lead=(50, 40), requires_grad=False)
    logits, expected = operands.deferred(), operands.eager()
    counted = _count_rows(monkeypatch)
    start = threading.Barrier(4)

    def read(_):
        start.wait(timeout=60)
        return logits + 0

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(read, range(4)))
    assert counted == [2000]
    assert all(torch.equal(result, expected) for result in results)


def test_a_view_and_its_aliases_are_computed_once(monkeypatch):
    row = Operands().deferred()[:, -1]
    counted = _count_rows(monkeypatch)
    row.detach().sum()
    (row * row).sum().backward()
    assert counted == [2]


def test_rows_that_are_repeated_are_computed_once(monkeypatch):
    logits = Operands().deferred()
    counted = _count_rows(monkeypatch)
    logits[:, :1].expand(2, 4, WORDS) + 0
    assert counted == [2]


FACTORIES = {
    "new_zeros": lambda x: x.new_zeros((3, 2)),
    "new_full": lambda x: x.new_full((2,), 7.0, dtype=torch.int64),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "zeros_like": lambda x: torch.zeros_like(x[:, 1:]),
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.int64),
    "full_like": lambda x: torch.full_like(x, 2.0),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_what_reads_no_number_computes_nothing(name):
    operands = Operands()
    logits = operands.deferred()
    result, expected = FACTORIES[name](logits), FACTORIES[name](operands.eager())
    assert is_deferred(logits)
    assert type(result) is torch.Tensor
    assert torch.equal(result, expected)
    assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())


REDUCTIONS = {
    "argmax": lambda x: x.argmax(-1),
    "argmax by positive dimension": lambda x: x.argmax(dim=2, keepdim=True),
    "argmin": lambda x: x.argmin(-1),
    "max": lambda x: x.max(-1),
    "min, kept": lambda x: x.min(dim=-1, keepdim=True),
    "topk": lambda x: x.topk(3),
    "topk of a view": lambda x: x[:, 1:].topk(2, dim=-1, largest=False),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_largest_of_each_row_is_found_in_chunks(name, monkeypatch):
    monkeypatch.setattr(values, "CHUNK_BYTES", 3 * WORDS * 8)
    operands = Operands(CAPPED)
    logits = operands.deferred()
    counted = _count_rows(monkeypatch)
    results, expected = REDUCTIONS[name](logits), REDUCTIONS[name](operands.eager())
    assert is_deferred(logits)
    assert max(counted[:-1]) == 3
    for one, other in zip(_as_tuple(results), _as_tuple(expected), strict=True):
        assert type(one) is torch.Tensor
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert one.requires_grad == other.requires_grad
        if other.requires_grad:
            assert_same_gradients(one, other, operands)


def _as_tuple(result: object) -> tuple:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_the_largest_along_another_dimension_is_not(dim, monkeypatch):
    monkeypatch.setattr(values, "CHUNK_BYTES", 3 * WORDS * 8)
    operands = Operands()
    logits = operands.deferred()
    assert torch.equal(logits.argmax(dim), operands.eager().argmax(dim))
    assert not is_deferred(logits)


def test_autograd_is_right_with_create_graph():
    operands = Operands(CAPPED)
    seconds = []
    for logits in (operands.deferred(), operands.eager()):
        first = torch.autograd.grad(logits.square().sum(), operands.all, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), operands.all))
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_backward_twice():
    operands = Operands(CAPPED)
    loss = operands.deferred().exp().sum()
    loss.backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in operands.all]
    loss.backward()
    for leaf, gradient in zip(operands.all, once, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_hooks_and_retained_gradients():
    operands = Operands()
    seen = []
    logits = operands.deferred()
    logits.register_hook(lambda gradient: seen.append(gradient.clone()))
    logits.retain_grad()
    (logits * 2).sum().backward()
    assert torch.equal(seen[0], torch.full((2, 5, WORDS), 2.0, dtype=torch.float64))
    assert torch.equal(logits.grad, seen[0])


def test_only_some_operands_need_gradients():
    operands = Operands(ADAPTED)
    operands.weights[0].requires_grad_(False)
    operands.rows[1].requires_grad_(False)
    assert_same_gradients(operands.deferred(), operands.eager(), operands)


def test_under_autocast_values_and_gradients_are_those_of_the_head():
    operands = Operands(CAPPED, dtype=torch.float32)
    expected = operands.eager()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = operands.deferred()
        assert logits.dtype == torch.float32
        assert torch.equal(logits.detach() + 0, expected)
        product, wanted = logits @ torch.ones(WORDS, 2), expected @ torch.ones(WORDS, 2)
        assert product.dtype == torch.bfloat16
        assert torch.equal(product, wanted)


@pytest.mark.parametrize("lead", [(), (0,), (2, 0)], ids=str)
def test_no_row_at_all_and_a_single_one(lead):
    operands = Operands(lead=lead)
    assert_same_gradients(operands.deferred(), operands.eager(), operands)
    assert torch.equal(operands.deferred().detach() + 0, operands.eager())


def test_one_word_only():
    rows, weight = torch.randn(3, 4), torch.randn(1, 4)
    logits = defer(PLAIN, [rows], [weight])
    torch.testing.assert_close(logits[1:].t() + 0, (rows @ weight.T)[1:].t())


def test_inference_mode_computes_at_once():
    operands = Operands()
    with torch.inference_mode():
        logits = defer(PLAIN, operands.rows, operands.weights)
        assert type(logits) is torch.Tensor
    inference = [row.clone() for row in operands.rows]
    with torch.inference_mode():
        inference = [row.clone() for row in operands.rows]
    assert type(defer(PLAIN, inference, [operands.weights[0].detach()])) is torch.Tensor


def test_what_is_read_in_inference_mode_can_be_trained_with_later():
    operands = Operands()
    logits = operands.deferred()
    with torch.inference_mode():
        assert torch.equal(logits + 0, operands.eager())
        assert torch.equal(logits[:, -1] + 0, operands.eager()[:, -1])
    assert_same_gradients(logits.exp(), operands.eager().exp(), operands)


PICKED = {
    "row": lambda x: x[:, -1],
    "all": lambda x: x[...],
    "flat": lambda x: x.view(-1, WORDS),
    "one of several": lambda x: x.unbind(0)[1],
    "detached": lambda x: x.detach(),
    "copy": lambda x: x.clone(),
}


@pytest.mark.parametrize("name", PICKED)
def test_a_view_made_in_inference_mode_is_no_inference_tensor_and_a_copy_is(name):
    operands = Operands()
    logits, expected = operands.deferred(), operands.eager()
    with torch.inference_mode():
        logits, expected = PICKED[name](logits), PICKED[name](expected)
    assert is_deferred(logits)
    assert (logits.is_inference(), logits.requires_grad) == (expected.is_inference(), expected.requires_grad)
    torch.testing.assert_close(logits + 0, expected + 0)
    if expected.requires_grad:
        assert_same_gradients(logits, expected, operands)


def test_transforms_compute_at_once():
    operands = Operands(requires_grad=False)
    weight = operands.weights[0]

    def of_one(row):
        return defer(PLAIN, [row], [weight]).sum()

    expected = operands.eager().sum(-1)
    torch.testing.assert_close(torch.func.vmap(torch.func.vmap(of_one))(operands.rows[0]), expected)
    torch.testing.assert_close(torch.func.grad(of_one)(operands.rows[0][0, 0]), weight.sum(0))


def test_transforms_of_a_deferred_tensor():
    operands = Operands(requires_grad=False)
    logits, expected = operands.deferred(), operands.eager()
    torch.testing.assert_close(torch.func.vmap(lambda x: x.softmax(-1))(logits), expected.softmax(-1))
    torch.testing.assert_close(torch.func.grad(lambda x: x.exp().sum())(operands.deferred()), expected.exp())


def test_tensor_subclasses_as_weights_are_left_to_torch():
    class Marked(torch.Tensor):
        pass

    operands = Operands(requires_grad=False)
    weight = operands.weights[0].as_subclass(Marked)
    assert not isinstance(defer(PLAIN, operands.rows, [weight]), DeferredTensor)


def test_a_cast_that_the_head_has_is_in_its_dtype():
    head = Head((Term(),), (Elementwise("cast", dtype=torch.float32),))
    operands = Operands(head, dtype=torch.bfloat16)
    logits = operands.deferred()
    assert logits.dtype == torch.float32
    assert torch.equal(logits.detach() + 0, operands.eager())
    assert torch.equal(logits.half().detach() + 0, operands.eager().half())


def test_with_a_torch_that_glue_does_not_know_it_is_computed_at_once(monkeypatch):
    operands = Operands(CAPPED)
    assert is_deferred(operands.deferred())
    monkeypatch.setattr(wrapper_tensors.DEFERRED, "_is_available", False)
    logits = defer(CAPPED, operands.rows, operands.weights, operands.biases)
    assert type(logits) is torch.Tensor
    assert_same_gradients(logits, operands.eager(), operands)
