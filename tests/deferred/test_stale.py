"""What was written since is not computed with: an error says what it is and what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glue_compiler.deferred.tensor import defer
from glue_compiler.errors import GlueDeferredError
from tests.deferred.logits import CAPPED, PLAIN, WORDS, Operands, is_deferred


def _step(tensor):
    with torch.no_grad():
        tensor.add_(1.0)


@pytest.mark.parametrize("role", ["rows", "weights", "biases"])
def test_an_operand_that_was_written(role):
    operands = Operands(CAPPED)
    logits = operands.deferred()
    _step(getattr(operands, role)[0])
    word = {"rows": "hidden state", "weights": "weight", "biases": "bias"}[role]
    with pytest.raises(GlueDeferredError, match=rf"a {word} .* has been written since.*\"logits\": \"kept\""):
        logits.sum()
    assert is_deferred(logits)


STALE = {
    "row": lambda x: x[:, -1],
    "cast": lambda x: x.float(),
    "copy": lambda x: x.clone(),
    "detached": lambda x: x.detach(),
    "picked": lambda x: x[torch.tensor([0])],
}


@pytest.mark.parametrize("name", STALE)
def test_what_was_made_of_it_is_stale_too(name):
    operands = Operands()
    part = STALE[name](operands.deferred())
    _step(operands.weights[0])
    assert is_deferred(part)
    with pytest.raises(GlueDeferredError):
        part.sum()


def test_rows_that_were_picked_are_copies():
    operands = Operands()
    logits, expected = operands.deferred(), operands.eager()
    picked = logits[torch.tensor([1])]
    _step(operands.rows[0])
    assert torch.equal(picked.detach() + 0, expected[1:].detach())
    with pytest.raises(GlueDeferredError):
        logits[torch.tensor([1])]


def test_a_view_of_a_weight_counts():
    operands = Operands()
    logits = operands.deferred()
    _step(operands.weights[0][0])
    with pytest.raises(GlueDeferredError):
        logits.sum()


def test_a_weight_that_nobody_wrote_is_read():
    operands = Operands()
    logits, expected = operands.deferred(), operands.eager()
    operands.weights[0].grad = torch.ones_like(operands.weights[0])
    _step(operands.weights[0].grad)
    assert torch.equal(logits.detach() + 0, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_weight_written_past_its_version_counter(dtype):
    operands = Operands(dtype=dtype)
    logits = operands.deferred()
    operands.weights[0].data.mul_(1.5)
    with pytest.raises(GlueDeferredError, match="past its version counter"):
        logits.sum()


def test_a_bias_written_past_its_version_counter():
    operands = Operands(CAPPED)
    logits = operands.deferred()
    operands.biases[0].data.add_(0.5)
    with pytest.raises(GlueDeferredError, match="a bias .* past its version counter"):
        logits.sum()


def test_hidden_states_that_numpy_refills():
    features = np.ones((6, 8), dtype=np.float32)
    logits = defer(PLAIN, [torch.from_numpy(features)], [torch.randn(WORDS, 8)])
    features[:] = 2.0
    with pytest.raises(GlueDeferredError, match="a hidden state .* past its version counter"):
        logits.sum()


def test_hidden_states_zeroed_through_data():
    operands = Operands()
    logits = operands.deferred()
    operands.rows[0].data.zero_()
    with pytest.raises(GlueDeferredError, match="a hidden state .* past its version counter"):
        logits[:, -1].sum()


STRIDED = {
    "columns": lambda weight: weight[:, 3:11],
    "every other row": lambda weight: weight[::2, :8],
    "a row for all": lambda weight: weight[:1, :8].expand(WORDS, 8),
    "columns, transposed": lambda weight: weight.t()[:WORDS, 4:12],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("written", [False, True])
def test_a_strided_weight_is_watched(name, written):
    whole = torch.randn(2 * WORDS, 16, dtype=torch.float64)
    weight, rows = STRIDED[name](whole), torch.randn(3, 8, dtype=torch.float64)
    logits, expected = defer(PLAIN, [rows], [weight]), rows @ weight.t()
    if not written:
        torch.testing.assert_close(logits + 0, expected)
        return
    whole.data.mul_(1.5)
    with pytest.raises(GlueDeferredError, match="past its version counter"):
        logits.sum()


def test_what_is_beside_a_strided_weight_may_be_written():
    whole = torch.randn(WORDS, 16, dtype=torch.float64)
    rows = torch.randn(3, 8, dtype=torch.float64)
    logits, expected = defer(PLAIN, [rows], [whole[:, :8]]), rows @ whole[:, :8].t()
    whole.data[:, 8:].zero_()
    torch.testing.assert_close(logits + 0, expected)


def test_a_weight_that_got_other_data():
    operands = Operands()
    logits, expected = operands.deferred(), operands.eager()
    operands.weights[0].data = torch.zeros_like(operands.weights[0])
    assert torch.equal(logits.detach() + 0, expected)


def test_a_weight_with_numbers_that_are_none_is_as_it_was():
    weight = torch.full((WORDS, 8), float("nan"))
    assert defer(PLAIN, [torch.ones(2, 8)], [weight]).isnan().all()


def test_a_transposed_weight_is_watched():
    weight = torch.randn(8, WORDS).t()
    logits = defer(PLAIN, [torch.ones(2, 8)], [weight])
    weight.data.add_(1.0)
    with pytest.raises(GlueDeferredError):
        logits.sum()


def test_a_weight_whose_memory_is_gone():
    operands = Operands(requires_grad=False)
    logits = operands.deferred()
    operands.weights[0].untyped_storage().resize_(0)
    with pytest.raises(GlueDeferredError, match="no longer in memory"):
        logits.sum()


def test_backward_through_values_that_were_read():
    operands = Operands(CAPPED)
    loss, expected = operands.deferred().square().sum(), operands.eager().square().sum()
    _step(operands.weights[0])
    for each in (loss, expected):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each.backward()


def test_backward_that_does_not_reach_the_weight():
    operands = Operands()
    leaf = operands.deferred()[:, -1].detach().requires_grad_()
    loss = leaf.square().sum()
    expected = 2 * operands.eager()[:, -1].detach()
    _step(operands.weights[0])
    loss.backward()
    torch.testing.assert_close(leaf.grad, expected)


def test_showing_it_says_why_there_are_no_values():
    operands = Operands()
    logits = operands.deferred()
    _step(operands.weights[0])
    assert "has been written since" in repr(logits)
    assert "(2, 5, 11)" in f"{logits}"


def test_it_is_a_runtime_error_and_one_of_glue():
    from glue_compiler.errors import GlueError

    assert issubclass(GlueDeferredError, (GlueError, RuntimeError))
