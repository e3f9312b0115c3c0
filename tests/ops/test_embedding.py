"""The gradient of a table, by torch's kernel, as an operator that compilers keep whole."""

import math

import pytest
import torch

from glue_compiler.ops import embedding_gradient
from glue_compiler.ops.embedding import _sum_few, pays

IDS = torch.tensor([[3, 0, 3], [1, 3, 2]])


@pytest.mark.parametrize("settings", [(), (3,), (-1, True)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_it_is_registered_as_it_behaves(settings, dtype):
    grad = torch.randn(3, 2, 8).transpose(0, 1)
    torch.library.opcheck(embedding_gradient, (grad, IDS.to(dtype), 9, *settings), test_utils="test_schema")
    torch.library.opcheck(embedding_gradient, (grad, IDS.to(dtype), 9, *settings), test_utils="test_faketensor")


def test_the_operator_has_the_gradient_of_the_embedding():
    weight = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda w: torch.ops.glue.embedding(w, IDS), weight)
    assert torch.autograd.grad(torch.ops.glue.embedding(weight, IDS, 3).sum(), weight)[0][3].abs().sum() == 0


@pytest.mark.parametrize("settings", [(), (3,), (-1, True)])
def test_no_rows_have_a_gradient_of_zeros(settings):
    found = embedding_gradient(torch.randn(2, 0, 8), IDS[:, :0], 9, *settings)
    assert torch.equal(found, torch.zeros(9, 8))


def test_a_table_on_a_cpu_or_in_fp32_does_not_pay():
    with torch.device("meta"):
        assert not pays(torch.empty(2**20, 64, dtype=torch.bfloat16))
    if torch.cuda.is_available():
        assert not pays(torch.empty(2**16, 64, device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [0, 1, 2048, 4096, 4097, 9000])
@pytest.mark.parametrize("settings", [(), (7,), (-1, True)])
def test_on_a_gpu_sums_are_in_fp32_and_nothing_waits(tokens, settings):
    ids = torch.randint(50, (1, tokens), device="cuda")
    grad = torch.randn(1, tokens, 96, device="cuda").bfloat16()
    embedding_gradient(grad, ids, 1000, *settings)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, again = (embedding_gradient(grad, ids, 1000, *settings) for _ in range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = embedding_gradient(grad.double().cpu(), ids.cpu(), 1000, *settings).cuda()
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-3)
    assert torch.equal(found, again)


@pytest.mark.parametrize("settings", [(), (3,), (2, True), (-1, True)])
@pytest.mark.parametrize("shape", [(2, 3), (6,), ()])
def test_few_rows_are_summed_in_a_small_table(settings, shape):
    ids = IDS.flatten()[: math.prod(shape)].view(shape)
    grad = torch.randn(*shape, 8, dtype=torch.bfloat16)
    found = _sum_few(grad, ids, 9, *(settings + (-1, False)[len(settings) :]))
    wanted = embedding_gradient(grad.double(), ids, 9, *settings)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=1e-6)
    assert found.is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_holds_no_table_in_fp32():
    table = torch.nn.Embedding(2**16, 512, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(2**16, (1, 1024), device="cuda")
    peaks, gradients = [], []
    for passes in ({}, {"sum_embedding_grads": False}):
        torch._dynamo.reset()
        call = torch.compile(lambda ids: table(ids).float().square().sum(), backend="glue", options={"passes": passes})
        for _ in range(2):
            table.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            call(ids).backward()
        peaks.append(torch.cuda.max_memory_allocated())
        gradients.append(table.weight.grad)
    torch.testing.assert_close(*gradients)
    assert peaks[1] - peaks[0] > 2**16 * 512 * 3  # of four bytes a number
