"""torch's own grouped product, replaced where another package's kernel is the faster one; against eager in bf16."""

import pytest
import torch

from glue_compiler.ops import quack_products
from tests.passes.group_experts.loops import compiled

OFFSETS = torch.tensor([3, 3, 24], dtype=torch.int32)
ROWS, DEEP, WIDE = 24, 64, 72


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setattr(quack_products, "pays", lambda x, weight: True)


def operands(weight=(3, DEEP, WIDE)):
    return [torch.randn(*sizes).bfloat16().requires_grad_() for sizes in ((ROWS, DEEP), weight)]


def result_and_gradients(fn, tensors):
    torch.manual_seed(1)
    out = fn(*tensors, OFFSETS)
    return [out, *torch.autograd.grad(out, tensors, torch.randn(out.shape).to(out.dtype))]


def replaced(fn, tensors, **options):
    run = compiled(fn, **options)
    found = result_and_gradients(run.call, tensors)
    for got, want in zip(found, result_and_gradients(fn, tensors), strict=True):
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    return run.counts.get("products_replaced", 0)


def through_a_view(x, weight, offsets):
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets)


SPELLINGS = {
    "torch": (lambda x, w, o: torch._grouped_mm(x, w, offs=o), (3, DEEP, WIDE)),
    "functional": (lambda x, w, o: torch.nn.functional.grouped_mm(x, w, offs=o), (3, DEEP, WIDE)),
    "operator": (lambda x, w, o: torch.ops.aten._grouped_mm(x, w, o), (3, DEEP, WIDE)),
    "operator, by position": (lambda x, w, o: torch.ops.aten._grouped_mm.default(x, w, o, None), (3, DEEP, WIDE)),
    "weights in another layout": (through_a_view, (3, WIDE, DEEP)),
    "written afterwards": (lambda x, w, o: torch._grouped_mm(x, w, offs=o).add_(1), (3, DEEP, WIDE)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_product_is_replaced(name, package):
    fn, sizes = SPELLINGS[name]
    assert replaced(fn, operands(sizes)) == 1


def test_autocast_casts_nothing_as_in_eager(package):
    def fn(x, weight, offsets):
        with torch.autocast("cpu", torch.float16):
            return torch._grouped_mm(x, weight, offs=offsets)

    assert replaced(fn, operands()) == 1


def test_where_the_package_does_not_pay_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(quack_products, "pays", lambda x, weight: False)
    assert replaced(SPELLINGS["torch"][0], operands()) == 0


def test_kernels_of_torch_alone(package):
    assert replaced(SPELLINGS["torch"][0], operands(), kernels="torch") == 0


def test_rows_that_lie_in_columns_stay(package):
    x, weight = operands()
    x = x.detach().t().contiguous().t().requires_grad_()
    assert replaced(SPELLINGS["torch"][0], [x, weight]) == 0


OTHERS = {
    "a product of columns": (lambda x, w, o: torch._grouped_mm(x.t(), w, offs=o), (ROWS, WIDE)),
    "a product of stacks": (lambda x, w, o: torch._grouped_mm(x[None].expand(3, -1, -1), w), (3, DEEP, WIDE)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_stay(name, package):
    fn, sizes = OTHERS[name]
    run = compiled(fn)
    x, weight = (each.detach() for each in operands(sizes))
    torch.testing.assert_close(run.call(x, weight, OFFSETS), fn(x, weight, OFFSETS), rtol=2e-2, atol=2e-2)
    assert "products_replaced" not in run.counts


def test_what_pays_is_asked_of_tensors_on_a_gpu_alone():
    x, weight = operands()
    assert not quack_products.pays(x, weight)


@pytest.mark.gpu
@pytest.mark.skipif(bool(quack_products.unusable()), reason=str(quack_products.unusable()))
@pytest.mark.parametrize("is_turned", [False, True])
def test_on_a_gpu_the_gradients_are_laid_out_as_the_weights(is_turned):
    offsets = torch.tensor([200, 200, 600], dtype=torch.int32, device="cuda")
    x = torch.randn(600, 128, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(3, *((192, 128) if is_turned else (128, 192)), device="cuda").bfloat16().requires_grad_()

    def fn(x, weight):
        return torch._grouped_mm(x, weight.transpose(1, 2) if is_turned else weight, offs=offsets)

    run = compiled(fn, compiler="inductor")
    grad = torch.randn(600, 192, device="cuda").bfloat16()
    found = [run.call(x, weight), *torch.autograd.grad(run.call(x, weight), (x, weight), grad)]
    wanted = [fn(x, weight), *torch.autograd.grad(fn(x, weight), (x, weight), grad)]
    for got, want in zip(found, wanted, strict=True):
        assert got.stride() == want.stride()
        assert (got.double() - want.double()).norm() <= 1e-2 * want.double().norm()
    assert run.counts["products_replaced"] == 1
