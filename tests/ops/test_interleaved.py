"""deinterleave: the bits of every second column, forward and backward."""

import pytest
import torch

from glue_compiler.ops import interleaved

deinterleave = torch.ops.glue.deinterleave


def special_values(device="cpu"):
    """All bf16 numbers, infinities and zeros of both signs among them; a NaN stays one, but its bits may change."""
    numbers = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[~numbers.isnan()]
    return numbers[: len(numbers) // 16 * 16].view(-1, 16)


def same_bits(got, want):
    return torch.equal(got.contiguous().view(torch.int16), want.contiguous().view(torch.int16))


def test_pairs_of_bf16_keep_their_bits():
    x = special_values()
    even, odd = interleaved._Deinterleave.apply(x)
    assert same_bits(even, x[..., ::2])
    assert same_bits(odd, x[..., 1::2])
    assert same_bits(interleaved._Interleave.apply(even, odd), x)


def test_a_nan_stays_in_its_column():
    x = torch.tensor([[float("nan"), 1, 2, float("nan")]], dtype=torch.bfloat16)
    even, odd = interleaved._Deinterleave.apply(x)
    assert even.isnan().tolist() == [[True, False]]
    assert odd.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_dtype_and_strides(dtype):
    for x in (torch.randn(3, 8), torch.randn(8, 3).t(), torch.randn(2, 3, 10)[..., 1:9]):
        x = x.to(dtype)
        for got, want in zip(deinterleave(x), (x[..., ::2], x[..., 1::2]), strict=True):
            assert torch.equal(got, want)


def test_gradients_are_those_of_the_slices(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # the same code runs on any device
    x = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
    left, right = torch.randn(2, 4, 3, dtype=torch.bfloat16).unbind()
    even, odd = deinterleave(x)
    (got,) = torch.autograd.grad((even * odd * left + right * odd).sum(), x, create_graph=True)
    (want,) = torch.autograd.grad(
        (x[..., ::2] * x[..., 1::2] * left + right * x[..., 1::2]).sum(), x, create_graph=True
    )
    assert torch.equal(got, want)
    first, second = (torch.autograd.grad(grad.square().sum(), x, retain_graph=True)[0] for grad in (got, want))
    assert torch.equal(first, second)


def test_one_half_alone_has_a_gradient(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(deinterleave(x)[1].sum(), x)
    assert torch.equal(grad, torch.tensor([[0, 1, 0, 1]] * 2, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_on_a_gpu():
    x = special_values("cuda")
    even, odd = torch.compile(lambda x: deinterleave(x), fullgraph=True)(x)
    assert same_bits(even, x[..., ::2])
    assert same_bits(odd, x[..., 1::2])

    def step(halves):
        y = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16).requires_grad_()
        gate, up = halves(y)
        (up.float().square() * gate.float()).sum().backward()
        return y.grad

    compiled = torch.compile(lambda y: deinterleave(y), fullgraph=True)
    torch.testing.assert_close(step(compiled), step(lambda y: (y[..., ::2], y[..., 1::2])))
