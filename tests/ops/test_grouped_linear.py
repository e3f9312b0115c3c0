"""grouped_linear and grouped_outer: one product per expert, without a loop and without a copy."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.ops import grouped_linear, grouped_outer

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# (K, N): nothing aligned, everything aligned, several tiles, a LoRA's narrow side, single columns.
WIDTHS = [(7, 5), (64, 128), (72, 264), (128, 8), (1, 16), (16, 1)]


def _problem(routing, wide_in, wide_out, dtype, *, transposed=False, extra_rows=3):
    device = routing.ids.device
    offsets = routing.offsets()
    x = torch.randn(int(offsets[-1]) + extra_rows, wide_in, device=device).to(dtype)
    weight = torch.randn(routing.num_experts, wide_out, wide_in, device=device).to(dtype)
    bias = torch.randn(routing.num_experts, wide_out, device=device).to(dtype)
    return x, weight.transpose(1, 2).contiguous() if transposed else weight, offsets, bias


def _loop(x, weight, offsets, bias=None, transposed=False):
    """The reference, in float64 and with torch's own derivative."""
    pieces, start = [], 0
    for expert, end in enumerate(offsets.tolist()):
        matrix = weight[expert] if transposed else weight[expert].t()
        piece = x[start:end].double() @ matrix.double()
        pieces.append(piece if bias is None else piece + bias[expert].double())
        start = end
    pieces.append(torch.zeros(x.shape[0] - start, pieces[0].shape[1], dtype=torch.float64, device=x.device))
    return torch.cat(pieces)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
def test_equals_a_product_per_expert_and_zeros_behind_them(ragged, widths, dtype, biased, transposed, close):
    x, weight, offsets, bias = _problem(ragged, *widths, dtype, transposed=transposed)
    out = grouped_linear(x, weight, offsets, bias if biased else None, transposed)
    close(out, _loop(x, weight, offsets, bias if biased else None, transposed))
    assert (out[int(offsets[-1]) :] == 0).all()


@pytest.mark.parametrize("extra_rows", [0, 1])
def test_every_routing(routing, extra_rows, close):
    x, weight, offsets, bias = _problem(routing, 24, 40, torch.float32, extra_rows=extra_rows)
    close(grouped_linear(x, weight, offsets, bias), _loop(x, weight, offsets, bias))
    close(grouped_outer(x, x, offsets), grouped_outer(x.double(), x.double(), offsets))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("widths", [(7, 5), (64, 128)])
def test_gradients_are_the_loops(routing, widths, dtype, transposed, close):
    problem = _problem(routing, *widths, dtype, transposed=transposed)
    x, weight, offsets, bias = (tensor.requires_grad_(tensor.is_floating_point()) for tensor in problem)
    target = torch.randn(x.shape[0], widths[1], device=x.device).to(dtype)
    grouped_linear(x, weight, offsets, bias, transposed).backward(target)
    grads = [tensor.grad for tensor in (x, weight, bias)]
    expected = torch.autograd.grad(
        _loop(x, weight, offsets, bias, transposed), (x, weight, bias), target.double(), materialize_grads=True
    )
    for grad, reference, tensor in zip(grads, expected, (x, weight, bias), strict=True):
        assert grad.dtype == tensor.dtype
        close(grad, reference)


def test_gradcheck(device):
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    shapes = (6, 2), (3, 2, 2), (3, 2)
    x, weight, bias = (torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert torch.autograd.gradcheck(lambda x, w, b: grouped_linear(x, w, offsets, b), (x, weight, bias))


def test_an_expert_without_rows_has_a_zero_gradient(ragged):
    x, weight, offsets, _ = _problem(ragged, 8, 8, torch.float32)
    assert int(offsets[1]) == int(offsets[0])
    grouped_linear(x, weight.requires_grad_(), offsets).sum().backward()
    assert (weight.grad[1] == 0).all()
    assert (weight.grad[0] != 0).any()


def test_nan_in_one_experts_rows_stays_there(ragged):
    x, weight, offsets, _ = _problem(ragged, 64, 64, torch.float32)
    first = slice(0, int(offsets[0]))
    x[first] = float("nan")
    weight[-1] = float("inf")
    out = grouped_linear(x, weight, offsets)
    assert out[first].isnan().all()
    assert out[int(offsets[0]) : int(offsets[-2])].isfinite().all()
    grad = grouped_outer(x, x, offsets)
    assert grad[0].isnan().all()
    assert grad[1:].isfinite().all()


def test_frozen_weights_cost_nothing(ragged, monkeypatch):
    x, weight, offsets, bias = _problem(ragged, 8, 8, torch.float32)
    kept: list[torch.Tensor] = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = grouped_linear(x.requires_grad_(), weight, offsets, bias)
    assert all(tensor.data_ptr() != x.data_ptr() for tensor in kept), "x is only needed for the weight's gradient"
    assert any(tensor.data_ptr() == weight.data_ptr() for tensor in kept), "the weight is kept without a copy"
    with torch.profiler.profile() as profile:
        out.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert "glue::grouped_linear" in names
    assert not names & {"glue::grouped_outer", "glue::grouped_sum"}


def test_frozen_input_keeps_no_weight(ragged):
    x, weight, offsets, _ = _problem(ragged, 8, 8, torch.float32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = grouped_linear(x, weight.requires_grad_(), offsets)
    assert all(tensor.data_ptr() != weight.data_ptr() for tensor in kept)
    out.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("transposed", [False, True])
def test_strides_do_not_matter(ragged, transposed, close):
    x, weight, offsets, bias = _problem(ragged, 16, 24, torch.float32, transposed=transposed)
    expected = _loop(x, weight, offsets, bias, transposed)
    wide = torch.randn(x.shape[0], 40, device=x.device)
    wide[:, 8:24] = x
    spread = torch.randn(weight.shape[0], weight.shape[1], 2 * weight.shape[2], device=x.device)
    spread[..., ::2] = weight
    inside = torch.randn(weight.shape[0], weight.shape[1] + 3, weight.shape[2], device=x.device)
    inside[:, 2:-1] = weight
    for rows in (x, x.t().contiguous().t(), wide[:, 8:24]):
        for stack in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2), spread[..., ::2], inside[:, 2:-1]):
            close(grouped_linear(rows, stack, offsets, bias, transposed), expected)
    spread = torch.stack([offsets, offsets + 9], dim=1)[:, 0]
    close(grouped_linear(x, weight, spread, bias, transposed), expected)
    gradient = torch.randn(1, 24, device=x.device).expand(x.shape[0], 24)
    close(grouped_outer(gradient, wide[:, 8:24], offsets), grouped_outer(gradient.double(), x.double(), offsets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bitwise_equal(device, dtype):
    offsets = torch.tensor([100, 100, 390, 500], dtype=torch.int32, device=device)
    x = torch.randn(512, 128, device=device).to(dtype)
    weight = torch.randn(4, 256, 128, device=device).to(dtype)
    first = grouped_linear(x, weight, offsets), grouped_outer(x, x, offsets)
    for _ in range(2):
        again = grouped_linear(x, weight, offsets), grouped_outer(x, x, offsets)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [40, 200, 700])
def test_many_rows_per_expert_take_other_tiles(device, dtype, rows, close):
    """Few and many rows per expert choose different kernels on a GPU; all must give the same function."""
    counts = torch.tensor([rows, 0, rows // 2 + 1, 2 * rows - 3], device=device)
    offsets = counts.cumsum(0).int()
    x = torch.randn(int(offsets[-1]) + 5, 192, device=device).to(dtype)
    weight = torch.randn(4, 136, 192, device=device).to(dtype)
    for stack, transposed in ((weight, False), (weight.transpose(1, 2).contiguous(), True)):
        close(grouped_linear(x, stack, offsets, None, transposed), _loop(x, stack, offsets, None, transposed))
    close(grouped_outer(x[:, :136].contiguous(), x, offsets), grouped_outer(x[:, :136].double(), x.double(), offsets))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("biased", [False, True])
def test_large_weights_take_wide_tiles(biased, close):
    counts = torch.tensor([300, 0, 131], device="cuda")
    offsets = counts.cumsum(0).int()
    x = torch.randn(440, 3008, device="cuda").bfloat16()
    weight = torch.randn(3, 4104, 3008, device="cuda").bfloat16() * 0.05
    bias = torch.randn(3, 4104, device="cuda").bfloat16() if biased else None
    close(grouped_linear(x, weight, offsets, bias), _loop(x, weight, offsets, bias, False))


def test_autocast_multiplies_in_the_autocast_dtype_and_returns_gradients_in_the_weights_dtype(ragged):
    x, weight, offsets, bias = _problem(ragged, 16, 8, torch.float32)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(x.device.type, dtype=dtype):
            out = grouped_linear(x, weight, offsets, bias)
        assert out.dtype == dtype
        assert torch.equal(out, grouped_linear(x.to(dtype), weight.to(dtype), offsets, bias.to(dtype)))
    out.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert grouped_linear(x.double(), weight.double(), offsets).dtype == torch.float64
    assert grouped_linear(x, weight, offsets).dtype == torch.float32


def test_wrong_arguments_are_value_errors(ragged):
    x, weight, offsets, bias = _problem(ragged, 6, 4, torch.float32)
    for message, arguments in {
        "x has K = 6": (x, weight, offsets, bias, True),
        "4 offsets for 5 experts": (x, weight, offsets[:-1], bias),
        "one dtype": (x, weight.double(), offsets, bias),
        "int32 vector": (x, weight, offsets.long(), bias),
        "3 dimensions": (x, weight[0], offsets, bias),
        "bias must be": (x, weight, offsets, bias[:, :-1]),
    }.items():
        with pytest.raises(ValueError, match=message):
            grouped_linear(*arguments)
    with pytest.raises(ValueError, match="one dtype"):
        grouped_outer(x, x.double(), offsets)
    with pytest.raises(ValueError, match="same rows"):
        grouped_outer(x, x[:-1], offsets)


def test_opcheck(ragged):
    x, weight, offsets, bias = _problem(ragged, 6, 4, torch.float32)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    torch.library.opcheck(grouped_linear, (x, weight, offsets, bias))
    torch.library.opcheck(grouped_linear, (x, weight.detach().transpose(1, 2).contiguous(), offsets, None, True))
    torch.library.opcheck(grouped_outer, (x.detach(), x.detach(), offsets))
