"""Graphs whose operators run one by one, as eager runs them."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.captured import assert_same_bits


def a_gradient_of_other_strides(x, weight):
    # The gradient comes from the transposed use: traced with the strides of the input, it has those of the gradient.
    return F.softplus(F.linear(x, weight)).transpose(1, 2).contiguous().sin()


def test_views_of_gradients_have_the_strides_that_operators_give_them():
    x, weight = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 3), (4, 3)))
    compiled = torch.compile(a_gradient_of_other_strides, backend="glue", options={"compiler": "aot_eager"})
    assert_same_bits(a_gradient_of_other_strides, compiled, [x, weight])


def test_views_of_a_step_that_passes_edit_too():
    x, weight = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 3), (4, 3)))
    options = {"compiler": "aot_eager", "offload": "checkpoints"}
    compiled = torch.compile(a_gradient_of_other_strides, backend="glue", options=options)
    assert_same_bits(a_gradient_of_other_strides, compiled, [x, weight])


def test_what_is_returned_still_shares_memory_with_the_input():
    def views(x):
        return x.view(6, -1)

    x = torch.randn(2, 3, 4)
    found = torch.compile(views, backend="glue", options={"compiler": "aot_eager"})(x)
    assert found.data_ptr() == x.data_ptr()
    assert found._is_view()


def test_the_caller_may_write_to_a_product():
    """Its rows are multiplied as one matrix, and what is made of that is no view of it."""

    def products(x, weight):
        return (x @ weight,)

    def written(fn, given):
        (found,) = fn(*given)
        found.mul_(2)
        return found, *torch.autograd.grad(found.sin().sum(), given)

    given = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 3), (3, 4))]
    compiled = torch.compile(products, backend="glue", options={"compiler": "aot_eager"})
    for got, want in zip(written(compiled, given), written(products, given), strict=True):
        torch.testing.assert_close(got, want)
