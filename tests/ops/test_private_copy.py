"""private_copy: a clone that no compiler takes out."""

import pytest
import torch

from tests.slow import slow_but

private_copy = torch.ops.glue.private_copy


@pytest.mark.parametrize("make", [lambda x: x, torch.Tensor.t, lambda x: x[:, ::2], lambda x: x[:0], lambda x: x[0, 0]])
def test_it_is_a_clone(make):
    x = make(torch.randn(3, 4))
    found = private_copy(x)
    assert torch.equal(found, x)
    assert found.stride() == x.clone().stride()
    assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()
    torch.library.opcheck(private_copy.default, (x.requires_grad_(),))


@pytest.mark.parametrize("backend", slow_but(("aot_eager",), ["aot_eager", "inductor"]))
def test_a_write_to_the_original_does_not_reach_what_backward_reads(backend):
    def fn(x, y):
        return private_copy(x) * y

    x, y = torch.full((8,), 2.0), torch.ones(8, requires_grad=True)
    out = torch.compile(fn, backend=backend)(x, y)
    x.zero_()
    out.sum().backward()
    assert y.grad.tolist() == [2.0] * 8
