"""What counts as the same result."""

import pytest
import torch

from glue_compiler.pipeline.results import Numerics
from glue_compiler.verify.compare import Named, find_mismatch


def mismatch(old, new, numerics, exact=None):
    reference = None if exact is None else [Named("x", exact)]
    return find_mismatch([Named("x", old)], [Named("x", new)], numerics, lambda: reference)


X = torch.randn(1000, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("numerics", Numerics)
def test_equal_bits_are_equal(numerics):
    with_nan = torch.tensor([1.0, float("nan"), float("inf")])
    assert mismatch(with_nan, with_nan.clone(), numerics) is None
    assert mismatch(torch.arange(3), torch.arange(3), numerics) is None
    assert mismatch(3, 3, numerics) is None
    assert mismatch(None, torch.zeros(3), numerics) is None  # a gradient that one side leaves out


@pytest.mark.parametrize("numerics", Numerics)
def test_sparse_gradients_are_compared_by_what_they_hold(numerics):
    found = torch.sparse_coo_tensor([[0, 2]], torch.tensor([1.0, 2.0]), (4,))
    assert mismatch(found, torch.sparse_coo_tensor([[2, 0]], torch.tensor([2.0, 1.0]), (4,)), numerics) is None
    assert "differ" in mismatch(found, found * 2, numerics).reason
    assert "sparse_coo" in mismatch(found, found.to_dense(), numerics).reason


def test_one_unit_in_the_last_place_is_close_and_not_bitwise():
    y = X.clone()
    y[3] = torch.nextafter(y[3], torch.tensor(9.0))
    assert mismatch(X, y, Numerics.CLOSE) is None
    found = mismatch(X, y, Numerics.BITWISE)
    assert "the same bits" in found.reason
    assert 0 < found.error < 1e-6


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (X, X * 1.01, "differs by up to"),
        (X, X[:10], "torch.float32\\[10\\] on cpu after"),
        (X, X.double(), "torch.float64"),
        (torch.arange(3), torch.tensor([0, 1, 3]), "1 of 3 elements differ"),
        (X, torch.where(X > 2, float("nan"), X), "differ|NaN"),
        (3, 4, "3 before glue, 4 after"),
        (X, None, "differs by up to"),
    ],
)
def test_wrong_values_are_wrong(numerics, old, new, says):
    assert mismatch(old, new, numerics) is not None
    import re

    assert re.search(says, mismatch(old, new, numerics).reason)


def test_a_missing_result_is_a_mismatch():
    assert find_mismatch([Named("x", 1)], [], Numerics.CLOSE).error == float("inf")


def test_one_wrong_element_of_many_small_ones_is_found():
    old = X.clone()
    old[5] = 1e-4
    new = old.clone()
    new[5] = 2e-2
    assert mismatch(old, new, Numerics.CLOSE, exact=old.double()) is not None


def test_a_more_exact_result_is_not_wrong():
    """A sum in fp32 in place of one in bf16 differs by more than rounding once, and is nearer to the truth."""
    x = torch.randn(64, 500, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double().sum(1)
    in_bf16 = torch.zeros(64, dtype=torch.bfloat16)
    for column in x.unbind(1):
        in_bf16 = in_bf16 + column
    in_fp32 = x.float().sum(1).bfloat16()
    assert (in_bf16 - in_fp32).abs().max() > 0.1
    assert mismatch(in_bf16, in_fp32, Numerics.CLOSE, exact) is None
    assert mismatch(in_fp32, in_bf16, Numerics.CLOSE, exact) is not None  # many times as far away


def test_the_reference_is_asked_for_once_and_only_where_it_is_needed():
    asked = []

    def exact():
        asked.append(1)
        return [Named("x", X.double()), Named("y", X.double())]

    both = [Named("x", X), Named("y", X)]
    find_mismatch(both, both, Numerics.CLOSE, exact)
    assert not asked
    find_mismatch(both, [Named("x", X * 1.1), Named("y", X * 1.1)], Numerics.CLOSE, exact)
    find_mismatch(both, [Named("x", X + 1e-5), Named("y", X + 1e-5)], Numerics.CLOSE, exact)
    assert len(asked) == 2
