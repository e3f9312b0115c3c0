"""Writes: views of deferred logits share memory as views of a tensor do, copies do not, and gradients follow."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from glue_compiler.errors import GlueDeferredError
from tests.deferred.logits import CAPPED, PLAIN, WORDS, Operands, assert_same_gradients, is_deferred


def _zero_words(x):
    x[..., 2:4] = 0.0
    return x


def _write_row(x):
    row = x[:, -1]
    row.mul_(3.0)
    return x


def _write_into_row_of_row(x):
    x.view(-1, WORDS)[3].fill_(1.5)
    return x


def _write_then_view(x):
    view = x[:, 1:]
    x.add_(1.0)
    return view


def _write_through_view_of_words(x):
    x[..., 5].neg_()
    return x[:, 1]


def _write_after_reading_the_view(x):
    view = x[:, 1:]
    view.sum()
    x.mul_(2.0)
    return view.exp()


def _fill_mask(x):
    return x.masked_fill_(torch.arange(WORDS) > 7, -1e9)


def _index_put(x):
    x[torch.tensor([0, 1]), torch.tensor([2, 3])] = 1.0
    return x


def _copy_before(x):
    copy = x.clone()
    x.zero_()
    return copy + x


def _cast_before(x):
    copy = x.to(torch.float32)
    x.zero_()
    return copy.double() + x


def _index_before(x):
    picked = x[:, torch.tensor([0, 2])]
    x.zero_()
    return picked + x[:, :2]


def _write_copy(x):
    copy = x.contiguous().clone()
    copy[:, 0].zero_()
    return copy + x


def _write_data(x):
    x.data[:, 0].zero_()
    return x


def _write_detached(x):
    x.detach()[:, 0].zero_()
    return x


def _write_unbound(x):
    with torch.no_grad():
        for row in x.view(-1, WORDS).unbind(0):
            row.div_(2.0)
    return x


def _write_foreach(x):
    with torch.no_grad():
        torch._foreach_mul_([x[0], x[1]], 2.0)
    return x


def _write_out(x):
    with torch.no_grad():
        torch.add(torch.ones_like(x), 1.0, out=x)
    return x


def _copy_into(x):
    return x.copy_(torch.ones(WORDS, dtype=x.dtype))


def _into_another(x):
    return torch.zeros(2, 5, WORDS, dtype=x.dtype).copy_(x[:, :1])


def _swap(x):
    with torch.no_grad():
        x[0].copy_(x[1])
    return x


WRITES = {name.lstrip("_"): fn for name, fn in list(globals().items()) if name.startswith("_") and callable(fn)}
WRITES.pop("is_deferred", None)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen_as_in_eager(name):
    operands = Operands(CAPPED)
    logits, eager = operands.deferred(), operands.eager()
    result, expected = WRITES[name](logits), WRITES[name](eager)
    torch.testing.assert_close(result.detach() + 0, expected.detach() + 0, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits.detach() + 0, eager.detach(), rtol=1e-12, atol=1e-12)
    assert logits._version == eager._version
    assert_same_gradients(result, expected, operands)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_without_gradients_is_seen_as_in_eager(name):
    operands = Operands(requires_grad=False)
    logits, eager = operands.deferred(), operands.eager()
    result, expected = WRITES[name](logits), WRITES[name](eager)
    torch.testing.assert_close(result + 0, expected + 0, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits + 0, eager, rtol=1e-12, atol=1e-12)


def test_a_write_returns_what_it_wrote_to():
    logits = Operands().deferred()
    assert logits.mul_(2.0) is logits
    row = logits[0]
    assert row.zero_() is row


def test_a_write_between_use_and_backward_is_an_error_as_in_eager():
    for make in (Operands().deferred, Operands().eager):
        logits = make()
        loss = (logits * logits).sum()
        logits[0].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_write_that_autograd_does_not_count_by_itself_is_counted():
    for make in (Operands().deferred, Operands().eager):
        logits = make()
        loss = (logits * logits).sum()
        with torch.no_grad():
            torch._foreach_mul_([logits.detach()], 2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_write_to_what_was_not_used_is_none():
    operands = Operands()
    logits = operands.deferred()
    loss = (logits[:1] * logits[:1]).sum()
    logits.clone().zero_()
    loss.backward()
    assert operands.rows[0].grad is not None


def test_multiple_views_that_may_not_be_written_with_gradients():
    for make in (Operands().deferred, Operands().eager):
        with pytest.raises(RuntimeError, match="output of a function that returns multiple views"):
            make().split(1)[0].zero_()


def test_leaves_that_need_gradients_may_not_be_written():
    for logits in (Operands(requires_grad=False).deferred(), Operands(requires_grad=False).eager()):
        logits.requires_grad_()
        with pytest.raises(RuntimeError, match="leaf"):
            logits.zero_()


def test_a_leaf_gets_its_gradient():
    operands = Operands()
    leaf = operands.deferred().detach().requires_grad_()
    leaf.exp().sum().backward()
    assert torch.equal(leaf.grad, operands.eager().detach().exp())
    assert operands.rows[0].grad is None


def test_detach_in_place():
    operands = Operands()
    logits = operands.deferred()
    logits.detach_()
    assert not logits.requires_grad
    assert torch.equal(logits + 0, operands.eager())


@pytest.mark.parametrize("reshape", [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(2, 2)])
def test_other_shapes_in_place_are_an_error_that_says_so(reshape):
    with pytest.raises(GlueDeferredError, match="shape of deferred logits in place"):
        reshape(Operands(lead=(3,), requires_grad=False).deferred())


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[:, 1], lambda x: x.view(-1, WORDS)[3:]])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_another_tensor_that_is_set_to_them_shares_their_memory(part, requires_grad):
    operands = Operands(CAPPED, requires_grad=requires_grad)
    logits, eager = operands.deferred(), operands.eager()
    others = [torch.zeros(3, dtype=torch.float64).set_(part(each.detach())) for each in (logits, eager)]
    assert others[0].stride() == others[1].stride()
    assert torch.equal(*others)
    for other in others:
        other.mul_(2.0)
    assert torch.equal(logits.detach() + 0, eager.detach())
    if requires_grad:
        assert_same_gradients(logits, eager, operands)


def test_a_tensor_takes_their_shape_and_not_their_numbers():
    logits = Operands(requires_grad=False).deferred()
    assert torch.ones(220, dtype=torch.float64).resize_as_(logits).eq(1.0).all()


@pytest.mark.parametrize(
    "source", [lambda: torch.zeros(3, dtype=torch.float64), lambda: Operands().deferred().detach()]
)
def test_they_are_not_set_to_another_tensor(source):
    with pytest.raises(GlueDeferredError, match="shape of deferred logits in place"):
        Operands(requires_grad=False).deferred().set_(source())


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_output_of_another_shape_is_an_error():
    logits = Operands(requires_grad=False).deferred()
    with pytest.raises(GlueDeferredError, match="shape of deferred logits"):
        torch.add(torch.ones(3), 1.0, out=logits)


def test_reads_leave_the_rows_alone():
    operands = Operands(PLAIN, requires_grad=False)
    before = [tensor.clone() for tensor in operands.all]
    logits = operands.deferred()
    logits[:, 0].add_(1.0)
    logits.zero_()
    for tensor, copy in zip(operands.all, before, strict=True):
        assert torch.equal(tensor, copy)
    assert not is_deferred(logits)


OTHER_DATA = {
    "as large": lambda: torch.ones(2, 5, WORDS, dtype=torch.float64),
    "smaller": lambda: torch.ones(3, dtype=torch.float64),
    "a part of something": lambda: torch.arange(12.0, dtype=torch.float64).view(3, 4)[:, 1:3],
}


@pytest.mark.parametrize("name", OTHER_DATA)
@pytest.mark.parametrize("is_computed", [False, True])
def test_they_take_other_data(name, is_computed):
    operands = Operands(CAPPED, requires_grad=False)
    logits, eager = operands.deferred(), operands.eager()
    views = logits[:, -1], eager[:, -1]
    if is_computed:
        logits.sum()
    for each in (logits, eager):
        each.data = OTHER_DATA[name]()
        each.mul_(2.0)
    torch.testing.assert_close(*views)
    assert (logits.shape, logits.stride()) == (eager.shape, eager.stride())
    assert torch.equal(logits, eager)
    assert np.array_equal(logits.numpy(), eager.numpy())


def test_other_data_keeps_the_history():
    operands = Operands()
    for logits in (operands.deferred(), operands.eager()):
        logits.data = torch.zeros_like(logits.data)
        (gradient,) = torch.autograd.grad(logits.sum(), operands.weights)
        torch.testing.assert_close(gradient, operands.rows[0].detach().sum((0, 1)).expand(WORDS, -1))


def test_they_take_the_data_of_other_logits():
    other = Operands(CAPPED, requires_grad=False)
    logits = Operands(requires_grad=False).deferred()
    logits.data = other.deferred()
    assert torch.equal(logits, other.eager())


@pytest.mark.parametrize("write", [lambda x: x.mul_(2.0), lambda x: x[0].zero_(), lambda x: x.clone().add_(1.0)])
def test_a_write_keeps_nothing_alive(write):
    logits = Operands(requires_grad=False).deferred()
    write(logits)
    memory = weakref.ref(logits._deferred.memory)
    gc.collect()
    gc.disable()
    try:
        write(logits)
        del logits
        assert memory() is None
    finally:
        gc.enable()
