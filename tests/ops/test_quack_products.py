"""QuACK is another package's: when glue takes its grouped products, and that they are glue's own."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from glue_compiler.errors import GlueWarning
from glue_compiler.ops import grouped_linear, grouped_outer, optional_package, quack_products

EXPERTS, ROWS, WIDE, DEEP = 2, 256, 128, 64


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch):
    quack_products.unusable.cache_clear()
    monkeypatch.setattr(quack_products, "_plans", {})
    monkeypatch.setattr(quack_products, "_failed", set())
    yield
    quack_products.unusable.cache_clear()


def installed(monkeypatch, load):
    monkeypatch.setattr(optional_package, "installed_version", lambda package: "0.6.5")
    monkeypatch.setattr(quack_products.importlib, "import_module", load)


# The choice, for tensors that lie on the CPU and are taken for a Hopper GPU's.


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(quack_products, "_device_serves", lambda tensor: True)
    monkeypatch.setattr(quack_products, "unusable", _usable())


def _usable():
    def usable():
        return None

    usable.cache_clear = lambda: None
    return usable


def rows(width=DEEP, count=ROWS, dtype=torch.bfloat16):
    return torch.zeros(count, width, dtype=dtype)


def stack(wide=WIDE, deep=DEEP, dtype=torch.bfloat16):
    return torch.zeros(EXPERTS, wide, deep, dtype=dtype)


OFFSETS = torch.tensor([100, ROWS], dtype=torch.int32)


def takes_linear(x=None, weight=None, bias=None, transposed=False):
    x = rows() if x is None else x
    return quack_products.serves_linear(x, stack() if weight is None else weight, OFFSETS, bias, transposed)


def test_another_device_is_not_served():
    assert not takes_linear()
    assert not quack_products.serves_outer(rows(), rows(WIDE), OFFSETS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_aligned_products_of_many_rows_are_served(hopper, dtype):
    x, weight = rows(dtype=dtype), stack(dtype=dtype)
    assert takes_linear(x, weight, torch.zeros(EXPERTS, WIDE, dtype=dtype))
    assert takes_linear(x, weight.transpose(1, 2), transposed=True)
    assert takes_linear(x, weight.transpose(1, 2).contiguous(), transposed=True)
    assert takes_linear(rows(2 * DEEP, dtype=dtype)[:, DEEP:], weight)
    assert takes_linear(x.t().contiguous().t(), weight)  # copied
    assert quack_products.serves_outer(x, rows(WIDE, dtype=dtype), OFFSETS)
    assert quack_products.serves_outer(x[:1].expand(ROWS, DEEP), rows(WIDE, dtype=dtype), OFFSETS) is False
    assert quack_products.serves_outer(x[:, :1].expand(ROWS, DEEP), rows(WIDE, dtype=dtype), OFFSETS)  # copied


def test_what_its_kernels_do_not_read_is_not_served(hopper):
    shifted = torch.zeros(ROWS * DEEP + 1, dtype=torch.bfloat16)[1:].view(ROWS, DEEP)
    assert not takes_linear(shifted), "an address that is not aligned"
    assert not takes_linear(rows(DEEP + 4)[:, :DEEP]), "rows that are not"
    assert not takes_linear(weight=stack(deep=DEEP + 4)[:, :, :DEEP])
    assert not takes_linear(weight=torch.zeros(EXPERTS, WIDE, 2 * DEEP, dtype=torch.bfloat16)[:, :, ::2])
    assert not takes_linear(weight=stack()[:1].expand(EXPERTS, WIDE, DEEP)), "a weight that is repeated"
    assert not takes_linear(weight=stack(WIDE + 4)), "rows of the result that are not aligned"
    bias = torch.zeros(EXPERTS * WIDE + 1, dtype=torch.bfloat16)[1:].view(EXPERTS, WIDE)
    assert not takes_linear(bias=bias)
    assert not takes_linear(rows(dtype=torch.float32), stack(dtype=torch.float32))
    assert not quack_products.serves_outer(rows(), rows(WIDE + 4), OFFSETS)
    assert not quack_products.serves_outer(shifted, rows(WIDE), OFFSETS)


def test_what_would_leave_its_tiles_empty_is_not_served(hopper):
    assert not takes_linear(rows(count=ROWS - 1)), "few rows for each expert"
    assert not takes_linear(rows(16), stack(deep=16)), "a LoRA's rank"
    assert not takes_linear(weight=stack(wide=16))
    assert not quack_products.serves_outer(rows(16), rows(WIDE), OFFSETS)
    none = torch.empty(0, dtype=torch.int32)
    assert not quack_products.serves_linear(rows(), stack()[:0], none, None, False)


def test_packages_may_be_left_out(hopper, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("a package was asked")

    monkeypatch.setattr(quack_products, "_launch", never)
    x, weight = torch.randn(ROWS, DEEP).bfloat16().requires_grad_(), torch.randn(EXPERTS, WIDE, DEEP).bfloat16()
    weight.requires_grad_()
    out = grouped_linear(x, weight, OFFSETS, None, False, False)
    out.backward(torch.randn(ROWS, WIDE).bfloat16())
    grouped_outer(x.detach(), out.detach(), OFFSETS, False)
    assert x.grad is not None
    assert weight.grad is not None


def test_a_kernel_that_cannot_be_made_is_replaced_and_not_tried_again(hopper, monkeypatch):
    tried = []

    def gemm(*arguments, **options):
        tried.append(arguments)
        raise RuntimeError("ptxas is missing")

    def clear(offsets, rows, clear=None):
        return offsets

    installed(monkeypatch, lambda name: types.SimpleNamespace(gemm=gemm))
    monkeypatch.setattr(quack_products, "_bounds", clear)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    x, weight = torch.randn(ROWS, DEEP).bfloat16(), torch.randn(EXPERTS, WIDE, DEEP).bfloat16()
    expected = grouped_linear(x, weight, OFFSETS, None, False, False)
    with pytest.warns(GlueWarning, match=r"quack-kernels 0.6.5 did not compute a grouped product.*ptxas is missing"):
        assert torch.equal(grouped_linear(x, weight, OFFSETS), expected)
    assert torch.equal(grouped_linear(x, weight, OFFSETS), expected)
    assert len(tried) == 1


# On a Hopper GPU with the package, against the operators' other kernels and a product per expert.


@pytest.fixture
def package():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its kernels are taken on Hopper GPUs alone")
    if reason := quack_products.unusable():
        pytest.skip(reason)


COUNTS = {
    "uneven": [700, 0, 129, 1, 300, 270],
    "one expert": [1500, 0, 0, 0, 0, 0],
    "none but the last": [0, 0, 0, 0, 0, 1411],
    "no rows at all": [0, 0, 0, 0, 0, 0],
    "tiles that are full": [256, 256, 256, 256, 256, 256],
}


def problem(counts, dtype, wide=264, deep=200, tail=37):
    offsets = torch.tensor(counts, device="cuda").cumsum(0).int()
    total = max(sum(counts), quack_products._ROWS_PER_EXPERT * len(counts)) + tail
    x = torch.randn(total, deep, device="cuda").to(dtype)
    x[sum(counts) :] = float("nan")  # rows of no expert are not read
    weight = torch.randn(len(counts), wide, deep, device="cuda").to(dtype) * 0.1
    return x, weight, offsets, torch.randn(len(counts), wide, device="cuda").to(dtype)


def assert_near(actual, exact):
    """Within the rounding of one sum to the dtype, whose terms were added in fp32."""
    assert actual.isfinite().all()
    unit = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), exact, rtol=unit, atol=unit * float(exact.abs().max().clamp(min=1)))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", list(COUNTS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_a_product_per_expert(package, counts, dtype, transposed, biased):
    x, weight, offsets, bias = problem(COUNTS[counts], dtype)
    given = weight.transpose(1, 2).contiguous() if transposed else weight
    bias = bias if biased else None
    assert quack_products.serves_linear(x, given, offsets, bias, transposed)
    out = quack_products.linear(x, given, offsets, bias, transposed)
    exact = torch.zeros(out.shape, dtype=torch.float64, device="cuda")
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        exact[start:end] = x[start:end].double() @ weight[expert].double().t()
        exact[start:end] += 0 if bias is None else bias[expert].double()
        start = end
    assert_near(out, exact)
    assert (out[start:] == 0).all()
    assert out.is_contiguous()
    assert torch.equal(out, quack_products.linear(x, given, offsets, bias, transposed))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", list(COUNTS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outer_is_a_product_per_expert(package, counts, dtype):
    left, _, offsets, _ = problem(COUNTS[counts], dtype)
    right = torch.randn(left.shape[0], 136, device="cuda").to(dtype)
    assert quack_products.serves_outer(left, right, offsets)
    out = quack_products.outer(left, right, offsets)
    starts = [0, *offsets.tolist()[:-1]]
    pairs = zip(starts, offsets.tolist(), strict=True)
    exact = torch.stack([left[start:end].double().t() @ right[start:end].double() for start, end in pairs])
    assert_near(out, exact)
    assert out.is_contiguous()
    assert torch.equal(out, quack_products.outer(left, right, offsets))


@pytest.mark.gpu
def test_nan_of_one_expert_stays_there(package):
    x, weight, offsets, _ = problem([300, 100, 400], torch.bfloat16)
    x[:300] = float("nan")
    out = quack_products.linear(x, weight, offsets, None, False)
    assert out[300:].isfinite().all()
    grads = quack_products.outer(x, x, offsets)
    assert grads[0].isnan().all()
    assert grads[1:].isfinite().all()


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing(package):
    import quack.gemm

    quack_products.linear(*problem([300, 400], torch.bfloat16)[:3], None, False)
    plans, kept = len(quack_products._plans), len(quack.gemm._gemm_plan_cache)
    for count in (401, 517, 900):
        x, weight, offsets, _ = problem([count, 2 * count], torch.bfloat16)
        out = quack_products.linear(x, weight, offsets, None, False)
        assert_near(out[:count], x[:count].double() @ weight[0].double().t())
    assert (len(quack_products._plans), len(quack.gemm._gemm_plan_cache)) == (plans, kept)


@pytest.mark.gpu
def test_the_host_does_not_wait_and_the_current_stream_is_used(package):
    x, weight, offsets, bias = problem([300, 100, 400], torch.bfloat16)
    expected = quack_products.linear(x, weight, offsets, bias, False), quack_products.outer(x, x, offsets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # What is captured ran on the stream of the capture, and did not wait.
    with torch.cuda.graph(graph, stream=stream):
        got = quack_products.linear(x, weight, offsets, bias, False), quack_products.outer(x, x, offsets)
    for tensor in got:
        tensor.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_the_other_kernels(package, transposed):
    results = []
    for packages in (True, False):
        torch.manual_seed(1)
        x, weight, offsets, bias = problem([300, 0, 500], torch.bfloat16, tail=5)
        x.nan_to_num_(0)
        weight = weight.transpose(1, 2).contiguous() if transposed else weight
        for tensor in (x, weight, bias):
            tensor.requires_grad_()
        out = grouped_linear(x, weight, offsets, bias, transposed, packages)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, weight.grad, bias.grad))
    for with_package, own in zip(*results, strict=True):
        scale = float(own.abs().max())
        torch.testing.assert_close(with_package, own, rtol=2e-2, atol=2e-2 * scale)
        assert with_package.stride() == own.stride()
