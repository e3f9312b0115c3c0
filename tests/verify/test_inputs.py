"""Copies of a call's inputs: the same layout, the same aliases, nothing shared with the originals."""

import pytest
import torch

from glue_compiler.verify.inputs import CannotCopy, record_inputs

LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "part": lambda: torch.randn(5, 6)[1:3, ::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "empty": lambda: torch.randn(0, 4),
    "scalar": lambda: torch.tensor(2.0),
    "detached": lambda: torch.randn(4, requires_grad=True).detach(),
    "leaf": lambda: torch.randn(4, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(4)),
    "result": lambda: torch.randn(4, requires_grad=True) * 2,
    "view of a result": lambda: (torch.randn(4, 2, requires_grad=True) * 2)[1:],
    "integers": lambda: torch.arange(6).view(2, 3),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_copy_looks_like_the_input(make):
    value = make()
    (copied,), leaves = record_inputs([value]).arguments()
    assert torch.equal(copied, value)
    assert (copied.stride(), copied.dtype, copied.requires_grad) == (value.stride(), value.dtype, value.requires_grad)
    assert copied.is_leaf == value.is_leaf
    assert copied.untyped_storage().data_ptr() != value.untyped_storage().data_ptr() or not value.numel()
    assert len(leaves) == value.requires_grad
    if value.requires_grad:
        (gradient,) = torch.autograd.grad((copied * 3).sum(), list(leaves.values()))
        assert gradient.sum() == 3 * value.numel()


def test_two_views_of_one_tensor_share_memory():
    base = torch.zeros(4, 2)
    (first, second, third), _ = record_inputs([base[1:], base.t(), torch.zeros(4)]).arguments()
    first.fill_(1)
    assert second.sum() == 6
    assert third.sum() == 0
    assert base.sum() == 0
    assert first._base is second._base is not None


def test_tensors_over_one_memory_without_a_common_base():
    storage = torch.zeros(6)
    first = torch.empty(0).set_(storage.untyped_storage(), 0, (4,), (1,))
    second = torch.empty(0).set_(storage.untyped_storage(), 2, (4,), (1,))
    (one, other), _ = record_inputs([first, second]).arguments()
    one.fill_(1)
    assert other.tolist() == [1, 1, 0, 0]


def test_the_gradient_of_a_tensor_and_of_its_view_goes_to_one_leaf():
    base = torch.ones(3, requires_grad=True) * 1
    recorded = record_inputs([base, base[1:]])
    (whole, part), leaves = recorded.arguments()
    whole.mul_(2)  # in place: neither is a leaf
    assert part.tolist() == [2, 2]
    ((memory, leaf),) = leaves.items()
    (gradient,) = torch.autograd.grad(whole.sum() + part.sum(), leaf)
    assert gradient.tolist() == [2, 4, 4]
    assert recorded.readers_of(memory) == [0, 1]


def test_each_call_gets_memory_of_its_own():
    recorded = record_inputs([torch.zeros(3), 5])
    (first, number), _ = recorded.arguments()
    first.add_(1)
    assert recorded.arguments()[0][0].sum() == 0
    assert number == 5


def test_in_fp64():
    (x, y), _ = record_inputs([torch.ones(2, dtype=torch.bfloat16), torch.arange(2)]).arguments(torch.float64)
    assert (x.dtype, y.dtype) == (torch.float64, torch.int64)


def test_what_was_changed_since():
    x, y = torch.ones(2), torch.ones(2)
    recorded = record_inputs([x, y, 3])
    x.add_(1)
    assert [recorded.is_still(i, value) for i, value in enumerate((x, y, 3))] == [False, True, True]


def test_what_cannot_be_copied_is_said():
    class Own(torch.Tensor):
        pass

    for value in (
        torch.ones(2).as_subclass(Own),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
    ):
        with pytest.raises(CannotCopy, match="not plain memory"):
            record_inputs([value])
    x = torch.ones(2)
    with pytest.raises(CannotCopy, match="two dtypes"):
        record_inputs([x, x.view(torch.int32)])
