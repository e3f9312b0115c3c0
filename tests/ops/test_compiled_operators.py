"""The operators put together to a mixture-of-experts layer, as a graph holds them, against the loop over experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import glue_compiler.ops  # noqa: F401  registers torch.ops.glue

glue = torch.ops.glue
E, TOP_K, H, I = 5, 3, 16, 24  # noqa: E741  the field's letters for experts, hidden and intermediate width


def layer(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    order, inverse, _, offsets = glue.expert_sort(ids, E)
    rows = glue.expert_gather(x, order, inverse, offsets, TOP_K)
    gate, up = glue.grouped_linear(rows, gate_up, offsets, bias).chunk(2, dim=-1)
    rows = glue.grouped_linear(F.silu(gate) * up, down, offsets)
    return glue.expert_combine(rows, order, inverse, offsets, TOP_K, weights)


def layer_of_lists(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    order, inverse, _, offsets = glue.expert_sort(ids, E)
    rows = glue.expert_gather(x, order, inverse, offsets, TOP_K)
    biases = list(bias.unbind())
    gate, up = glue.grouped_linear_list(rows, list(gate_up.unbind()), offsets, biases).chunk(2, dim=-1)
    rows = glue.grouped_linear_list(F.silu(gate) * up, list(down.unbind()), offsets, [])
    return glue.expert_combine(rows, order, inverse, offsets, TOP_K, weights)


def loop(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(E):
        position, token = torch.where(ids.t() == expert)
        gate, up = F.linear(x[token], gate_up[expert], bias[expert]).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, token, rows * weights[token, position, None])
    return out


def inputs(tokens: int, device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    ids = torch.randint(0, E + 1, (tokens, TOP_K), device=device)  # E itself is a sentinel
    shapes = (tokens, H), (tokens, TOP_K), (E, 2 * I, H), (E, H, I), (E, 2 * I)
    x, weights, *parameters = (torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes)
    return x, ids, weights, *parameters


def with_gradients(function, arguments: tuple[Tensor, ...]) -> list[Tensor]:
    out = function(*arguments)
    leaves = [argument for argument in arguments if argument.requires_grad]
    target = torch.sin(torch.arange(out.numel(), device=out.device)).view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad((out * target).sum(), leaves)]


class Counter:
    def __init__(self, backend: str) -> None:
        self.compiled, self.backend = 0, backend

    def __call__(self, graph, example_inputs):
        self.compiled += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, example_inputs)


@pytest.mark.parametrize("function", [layer, layer_of_lists])
def test_eager_layer_and_gradients_are_the_loops(function, device, close):
    arguments = inputs(29, device)
    for value, expected in zip(with_gradients(function, arguments), with_gradients(loop, arguments), strict=True):
        close(value, expected)


@pytest.mark.parametrize("function", [layer, layer_of_lists])
def test_one_graph_serves_every_number_of_tokens(function, device, close):
    torch._dynamo.reset()
    counter = Counter("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (29, 7, 50):
        arguments = inputs(tokens, device)
        for value, expected in zip(with_gradients(compiled, arguments), with_gradients(loop, arguments), strict=True):
            close(value, expected)
    assert counter.compiled == 1


def test_frozen_weights_have_no_outer_product_in_the_backward_graph(device):
    from torch._dynamo.backends.common import aot_autograd

    names: list[str] = []

    def record(graph, example_inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x, ids, weights, *parameters = inputs(29, device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    compiled(x, ids, weights.detach(), *(parameter.detach() for parameter in parameters)).sum().backward()
    assert "glue.grouped_linear.default" in names
    assert not {"glue.grouped_outer.default", "glue.grouped_sum.default"} & set(names)


def test_autocast_inside_the_compiled_function(device):
    def under_autocast(*arguments):
        with torch.autocast(device, dtype=torch.bfloat16):
            return layer(*arguments)

    arguments = inputs(29, device, torch.float32)
    torch._dynamo.reset()
    compiled = with_gradients(torch.compile(under_autocast, backend="aot_eager", fullgraph=True), arguments)
    for value, expected in zip(compiled, with_gradients(under_autocast, arguments), strict=True):
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("function", [layer, layer_of_lists])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nothing_waits_for_the_host(self, function, dtype):
        arguments = inputs(64, "cuda", dtype)
        with_gradients(function, arguments)  # compiles the kernels
        arguments = inputs(64, "cuda", dtype)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with_gradients(function, arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("function", [layer, layer_of_lists])
    def test_two_runs_are_bitwise_equal(self, function):
        arguments = inputs(500, "cuda", torch.bfloat16)
        first = with_gradients(function, arguments)
        for _ in range(3):
            assert all(map(torch.equal, first, with_gradients(function, arguments)))

    @pytest.mark.parametrize("function", [layer, layer_of_lists])
    def test_inductor_compiles_around_them(self, function, close):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for tokens in (64, 200):
            arguments = inputs(tokens, "cuda", torch.float32)
            exact = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in arguments]
            expected = with_gradients(loop, tuple(exact))
            for value, reference in zip(with_gradients(compiled, arguments), expected, strict=True):
                close(value, reference)

    def test_a_cuda_graph_replays_the_layer(self):
        arguments = [a.detach() for a in inputs(64, "cuda", torch.bfloat16)]
        expected = layer(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(*arguments)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)
