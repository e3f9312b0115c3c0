"""grouped_linear_list: experts that own their weights, never stacked."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.ops import grouped_linear, grouped_linear_list


def _experts(routing, wide_in, wide_out, dtype, *, transposed=False):
    device = routing.ids.device
    offsets = routing.offsets()
    x = torch.randn(int(offsets[-1]) + 2, wide_in, device=device).to(dtype)
    shape = (wide_in, wide_out) if transposed else (wide_out, wide_in)
    weights = [torch.randn(shape, device=device).to(dtype) for _ in range(routing.num_experts)]
    biases = [torch.randn(wide_out, device=device).to(dtype) for _ in range(routing.num_experts)]
    return x, weights, offsets, biases


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("widths", [(7, 5), (64, 136)])
def test_equals_the_stacked_product(routing, widths, transposed, dtype, close):
    x, weights, offsets, biases = _experts(routing, *widths, dtype, transposed=transposed)
    expected = grouped_linear(
        x.double(), torch.stack(weights).double(), offsets, torch.stack(biases).double(), transposed
    )
    close(grouped_linear_list(x, weights, offsets, biases, transposed), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_one_per_tensor(ragged, transposed, close):
    x, weights, offsets, biases = _experts(ragged, 12, 16, torch.float32, transposed=transposed)
    for tensor in (x, *weights, *biases):
        tensor.requires_grad_()
    target = torch.randn(x.shape[0], 16, device=x.device)
    grouped_linear_list(x, weights, offsets, biases, transposed).backward(target)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, torch.stack(weights), torch.stack(biases))]
    grouped_linear(leaves[0], leaves[1], offsets, leaves[2], transposed).backward(target.double())
    close(x.grad, leaves[0].grad)
    for expert, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        close(weight.grad, leaves[1].grad[expert])
        close(bias.grad, leaves[2].grad[expert])


def test_gradcheck(device):
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    count = len(offsets)
    shapes = [(6, 2)] + [(3, 2)] * count + [(3,)] * count
    leaves = [torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def run(x, *rest):
        return grouped_linear_list(x, list(rest[:count]), offsets, list(rest[count:]))

    assert torch.autograd.gradcheck(run, leaves)


def test_only_what_is_not_frozen_gets_a_gradient(ragged):
    x, weights, offsets, _ = _experts(ragged, 8, 8, torch.float32)
    weights[2].requires_grad_()
    grouped_linear_list(x, weights, offsets, []).sum().backward()
    assert [weight.grad is not None for weight in weights] == [False, False, True, False, False]


def test_all_frozen_means_no_outer_product(ragged):
    x, weights, offsets, biases = _experts(ragged, 8, 8, torch.float32)
    out = grouped_linear_list(x.requires_grad_(), weights, offsets, biases)
    with torch.profiler.profile() as profile:
        out.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert not names & {"glue::grouped_outer", "glue::grouped_sum"}
    assert x.grad is not None


def test_the_weights_are_not_stacked(ragged):
    x, weights, offsets, _ = _experts(ragged, 64, 64, torch.float32)
    with torch.profiler.profile() as profile:
        grouped_linear_list(x, weights, offsets, [])
    assert not {event.key for event in profile.key_averages()} & {"aten::stack", "aten::cat"}


def test_other_strides_and_new_addresses_are_seen(ragged, close):
    x, weights, offsets, _ = _experts(ragged, 16, 24, torch.float32)
    expected = grouped_linear(x, torch.stack(weights), offsets)
    weights[1] = weights[1].t().contiguous().t()
    weights[3] = torch.randn(24, 40, device=x.device)[:, 3:19].copy_(weights[3])
    close(grouped_linear_list(x, weights, offsets, []), expected)
    weights[0] = weights[0].clone()
    weights[0] += 1
    close(grouped_linear_list(x, weights, offsets, []), grouped_linear(x, torch.stack(weights), offsets))


def test_autocast(ragged):
    x, weights, offsets, biases = _experts(ragged, 16, 8, torch.float32)
    weights = [weight.requires_grad_() for weight in weights]
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = grouped_linear_list(x, weights, offsets, biases)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert weights[0].grad.dtype == torch.float32


def test_wrong_arguments_are_value_errors(ragged):
    x, weights, offsets, biases = _experts(ragged, 6, 4, torch.float32)
    for message, arguments in {
        "5 offsets for 4 weights": (x, weights[:-1], offsets, []),
        "weight 1 must be": (x, [weights[0], weights[1][:, :-1], *weights[2:]], offsets, []),
        "bias 0 must be": (x, weights, offsets, [bias[:-1] for bias in biases]),
        "2 biases for 5": (x, weights, offsets, biases[:2]),
        "x has K = 6": (x, weights, offsets, [], True),
    }.items():
        with pytest.raises(ValueError, match=message):
            grouped_linear_list(*arguments)


def test_opcheck(ragged):
    x, weights, offsets, biases = _experts(ragged, 6, 4, torch.float32)
    for tensor in (x, *weights, *biases):
        tensor.requires_grad_()
    torch.library.opcheck(grouped_linear_list, (x, weights, offsets, biases))
    torch.library.opcheck(grouped_linear_list, (x, weights, offsets, []))
