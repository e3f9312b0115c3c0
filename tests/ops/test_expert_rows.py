"""expert_gather and expert_combine: out to the experts and back, each the other's derivative."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.ops import expert_combine, expert_dot, expert_gather, expert_sort

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _indices(routing):
    order, inverse, _, offsets = expert_sort(routing.ids, routing.num_experts)
    return order, inverse, offsets


def _by_hand(routing, rows, weights):
    """The combination as the loop does it: each expert's rows times their weights, added to their tokens."""
    tokens = routing.ids.shape[0]
    out = torch.zeros(tokens, rows.shape[1], dtype=torch.float64, device=rows.device)
    start = 0
    for expert in range(routing.num_experts):
        position, token = routing.rows_of(expert)
        mine = rows[start : start + len(token)].double()
        factor = 1.0 if weights is None else weights[token, position, None].double()
        out.index_add_(0, token, mine * factor)
        start += len(token)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_brings_each_token_to_its_experts(routing, dtype):
    order, inverse, offsets = _indices(routing)
    top_k = routing.ids.shape[1]
    x = torch.randn(routing.ids.shape[0], 33, device=order.device).to(dtype)
    rows = expert_gather(x, order, inverse, offsets, top_k)
    expected = x[order.long() // top_k]
    expected[int(offsets[-1]) :] = 0
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_combine_is_the_loops_sum(routing, dtype, weighted, close):
    order, inverse, offsets = _indices(routing)
    rows = torch.randn(order.numel(), 33, device=order.device).to(dtype)
    weights = torch.rand(routing.ids.shape, device=order.device).to(dtype) if weighted else None
    out = expert_combine(rows, order, inverse, offsets, routing.ids.shape[1], weights)
    close(out, _by_hand(routing, rows, weights))


def test_combine_sums_in_float32_and_rounds_once(device):
    ids = torch.zeros(1, 4, dtype=torch.int64, device=device)
    order, inverse, _, offsets = expert_sort(ids, 1)
    rows = torch.tensor([[1.0], [2**-9], [2**-9], [2**-9]], dtype=torch.bfloat16, device=device)
    out = expert_combine(rows, order, inverse, offsets, 4)
    assert out.item() == 1.0078125  # each addition alone would have been rounded away
    assert expert_combine(rows, order, inverse, offsets, 4, None, torch.float32).item() == 1 + 3 * 2**-9


def test_what_stands_in_rows_of_no_expert_does_not_matter(ragged):
    order, inverse, offsets = _indices(ragged)
    end = int(offsets[-1])
    rows = torch.randn(order.numel(), 8, device=order.device, dtype=torch.float64)
    weights = torch.rand(ragged.ids.shape, device=order.device, dtype=torch.float64)
    tokens = torch.randn(ragged.ids.shape[0], 8, device=order.device, dtype=torch.float64)
    clean = expert_combine(rows, order, inverse, offsets, 3, weights)
    dots = expert_dot(rows, tokens, order, inverse, offsets, 3, torch.float64)
    rows[end:] = float("nan")
    weights[(ragged.ids < 0) | (ragged.ids >= 5)] = float("inf")
    assert torch.equal(expert_combine(rows, order, inverse, offsets, 3, weights), clean)
    assert torch.equal(expert_dot(rows, tokens, order, inverse, offsets, 3, torch.float64), dots)


@pytest.mark.parametrize("operator", [expert_gather, expert_combine])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients(ragged, operator, weighted):
    order, inverse, offsets = _indices(ragged)
    size = ragged.ids.shape[0] if operator is expert_gather else order.numel()
    values = torch.randn(size, 4, device=order.device, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(ragged.ids.shape, device=order.device, dtype=torch.float64, requires_grad=True)

    def run(values, weights):
        return operator(values, order, inverse, offsets, 3, weights if weighted else None)

    assert torch.autograd.gradcheck(run, (values, weights) if weighted else (values, None))


def test_gradients_have_their_tensors_dtypes(ragged):
    order, inverse, offsets = _indices(ragged)
    rows = torch.randn(order.numel(), 8, device=order.device, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(ragged.ids.shape, device=order.device, requires_grad=True)
    expert_combine(rows, order, inverse, offsets, 3, weights, torch.float32).sum().backward()
    assert rows.grad.dtype == torch.bfloat16
    assert weights.grad.dtype == torch.float32
    assert weights.grad.shape == weights.shape


def test_rows_are_kept_for_backward_only_for_the_weights(ragged):
    order, inverse, offsets = _indices(ragged)
    weights = torch.rand(ragged.ids.shape, device=order.device)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        rows = torch.randn(order.numel(), 8, device=order.device, requires_grad=True)
        expert_combine(rows, order, inverse, offsets, 3, weights)
        assert rows.shape not in kept
        expert_combine(rows, order, inverse, offsets, 3, weights.requires_grad_())
        assert rows.shape in kept


def test_strides_do_not_matter(ragged, close):
    order, inverse, offsets = _indices(ragged)
    rows = torch.randn(8, order.numel(), device=order.device).t()
    weights = torch.rand(*ragged.ids.shape[::-1], device=order.device).t()
    expected = expert_combine(rows.contiguous(), order, inverse, offsets, 3, weights.contiguous())
    assert torch.equal(expert_combine(rows, order, inverse, offsets, 3, weights), expected)
    spread = [torch.stack([index, index + 9], dim=1)[:, 0] for index in (order, inverse, offsets)]
    assert torch.equal(expert_combine(rows, *spread, 3, weights), expected)
    ones = torch.ones((), device=order.device).expand(ragged.ids.shape)
    assert torch.equal(expert_combine(rows, *spread, 3, ones), expert_combine(rows, order, inverse, offsets, 3))
    gradient = torch.randn(1, 8, device=order.device).expand(ragged.ids.shape[0], 8)
    assert torch.equal(
        expert_gather(gradient, order, inverse, offsets, 3),
        expert_gather(gradient.contiguous(), order, inverse, offsets, 3),
    )


def test_wide_rows_take_several_blocks(ragged, close):
    order, inverse, offsets = _indices(ragged)
    rows = torch.randn(order.numel(), 5000, device=order.device)
    weights = torch.rand(ragged.ids.shape, device=order.device)
    tokens = torch.randn(ragged.ids.shape[0], 5000, device=order.device)
    close(expert_combine(rows, order, inverse, offsets, 3, weights), _by_hand(ragged, rows, weights))
    close(
        expert_dot(rows, tokens, order, inverse, offsets, 3, torch.float32),
        expert_dot(rows.double(), tokens.double(), order, inverse, offsets, 3, torch.float64),
    )


def test_two_runs_are_bitwise_equal(ragged):
    order, inverse, offsets = _indices(ragged)
    rows = torch.randn(order.numel(), 100, device=order.device)
    weights = torch.rand(ragged.ids.shape, device=order.device)
    runs = [expert_combine(rows, order, inverse, offsets, 3, weights) for _ in range(3)]
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_wrong_arguments_are_value_errors(ragged):
    order, inverse, offsets = _indices(ragged)
    rows = torch.randn(order.numel(), 4, device=order.device)
    with pytest.raises(ValueError, match="top_k"):
        expert_combine(rows, order, inverse, offsets, 0)
    with pytest.raises(ValueError, match="int32 vector"):
        expert_combine(rows, order, inverse.long(), offsets, 3)
    with pytest.raises(ValueError, match="dimensions"):
        expert_gather(rows[None], order, inverse, offsets, 3)


def test_opcheck(ragged):
    order, inverse, offsets = _indices(ragged)
    rows = torch.randn(order.numel(), 4, device=order.device, requires_grad=True)
    tokens = torch.randn(ragged.ids.shape[0], 4, device=order.device, requires_grad=True)
    weights = torch.rand(ragged.ids.shape, device=order.device, requires_grad=True)
    torch.library.opcheck(expert_gather, (tokens, order, inverse, offsets, 3, weights))
    torch.library.opcheck(expert_gather, (tokens, order, inverse, offsets, 3))
    torch.library.opcheck(expert_combine, (rows, order, inverse, offsets, 3, weights, torch.float64))
    torch.library.opcheck(expert_dot, (rows.detach(), tokens.detach(), order, inverse, offsets, 3, torch.float32))
