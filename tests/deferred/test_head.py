"""A head gives what the operators of the graph gave, and its gradients are autograd's."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.nn import functional

from glue_compiler.deferred.head import Elementwise, Head, Term
from tests.deferred.logits import ADAPTED, CAPPED, PLAIN, Operands

HEADS = {"plain": PLAIN, "capped": CAPPED, "adapted": ADAPTED}


def _written_out(operands: Operands) -> torch.Tensor:
    rows, weights, biases = operands.rows, operands.weights, operands.biases
    if operands.head is PLAIN:
        return rows[0] @ weights[0].T
    if operands.head is CAPPED:
        return torch.tanh(functional.linear(rows[0], weights[0], biases[0]) / 3.0) * 3.0
    return (functional.linear(rows[0], weights[0]) + functional.linear(rows[1], weights[1]) * 0.5) * 0.25


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_have_the_bits_of_the_operators(name, dtype):
    operands = Operands(HEADS[name], dtype=dtype)
    expected = _written_out(operands)
    assert torch.equal(operands.eager(), expected)
    with torch.no_grad():  # where it works in place
        assert torch.equal(operands.eager(), expected)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("lead", [(2, 5), (7,), (), (0, 5)], ids=str)
def test_gradients_are_those_of_autograd(name, lead):
    operands = Operands(HEADS[name], lead)
    logits = _written_out(operands)
    gradient = torch.randn_like(logits)
    expected = torch.autograd.grad(logits, operands.all, gradient)
    found = operands.head.gradients(
        gradient, operands.rows, operands.weights, operands.biases, [True] * len(operands.all)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_no_gradient_is_made_that_is_not_needed():
    operands = Operands(CAPPED)
    gradient = torch.ones(2, 5, 11, dtype=torch.float64)
    found = operands.head.gradients(gradient, operands.rows, operands.weights, operands.biases, [False, True, False])
    assert [one is None for one in found] == [True, False, True]


def test_casts_go_where_the_graph_had_them():
    head = Head((Term(dtype=torch.bfloat16),), (Elementwise("cast", dtype=torch.float32),))
    operands = Operands(head, dtype=torch.float32)
    expected = (operands.rows[0].bfloat16() @ operands.weights[0].bfloat16().T).float()
    assert torch.equal(operands.eager(), expected)
    assert head.dtype(operands.rows, operands.weights) == torch.float32
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, operands.all, gradient)
    found = head.gradients(gradient, operands.rows, operands.weights, [], [True, True])
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_terms_of_two_dtypes_are_added_as_eager_adds_them():
    head = Head((Term(), Term(dtype=torch.float32)))
    operands = Operands(head, dtype=torch.bfloat16)
    rows, weights = operands.rows, operands.weights
    expected = rows[0] @ weights[0].T + rows[1].float() @ weights[1].float().T
    assert torch.equal(operands.eager(), expected)
    assert head.dtype(rows, weights) == expected.dtype == torch.float32


def test_autocast_around_it_changes_nothing():
    operands = Operands(CAPPED, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(operands.eager(), _without_autocast(operands))
        gradient = torch.randn(2, 5, 11)
        found = CAPPED.gradients(gradient, operands.rows, operands.weights, operands.biases, [True] * 3)
    expected = torch.autograd.grad(_written_out(operands), operands.all, gradient)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def _without_autocast(operands: Operands) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return _written_out(operands)


def test_it_is_plain_data():
    assert pickle.loads(pickle.dumps(CAPPED)) == CAPPED
