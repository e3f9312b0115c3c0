"""group_experts: loops that become one grouped computation, and give what they gave."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.captured import count, result_and_gradients
from tests.passes.group_experts.loops import (
    EXPERTS,
    INNER,
    WIDTH,
    assert_close_to_eager,
    assert_grouped,
    compiled,
    inputs_for,
    loop_r,
    routings,
)
from tests.slow import one_in

glue = torch.ops.glue


@pytest.mark.parametrize("routing", one_in(3, routings()))
def test_every_routing_of_a_stacked_loop(routing):
    selected = routings()[routing]
    run = compiled(loop_r)
    assert_close_to_eager(loop_r, run.call, selected, inputs_for(selected))
    assert_grouped(run)
    assert count(run.graph, glue.expert_sort.default) == 1
    assert count(run.graph, glue.grouped_linear.default) == 2


@pytest.mark.parametrize(("kernels", "last"), [("all", (False,)), ("torch", (False, False))])
def test_the_option_says_whether_kernels_of_packages_serve_the_products(kernels, last):
    selected = routings()["spread"]
    run = compiled(loop_r, kernels=kernels)
    assert_close_to_eager(loop_r, run.call, selected, inputs_for(selected))
    products = run.graph.graph.find_nodes(op="call_function", target=glue.grouped_linear.default)
    assert [node.args[4:] for node in products] == [last, last]


@pytest.mark.slow
def test_the_graph_is_as_small_with_many_experts():
    sizes = []
    for experts in (2, 12):
        torch._dynamo.reset()  # else the number of experts becomes dynamic
        selected = routings(experts, 2)["spread"]
        run = compiled(loop_r)
        run.call(*_with(selected, inputs_for(selected, experts)))
        sizes.append(len(run.graph.graph.nodes))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 1), (3, 3)])
def test_one_expert_one_slot_and_all_experts(experts, top_k):
    selected = routings(experts, top_k)["spread"]
    run = compiled(loop_r)
    assert_close_to_eager(loop_r, run.call, selected, inputs_for(selected, experts))
    assert_grouped(run)


def routed_block(x, router, gate_up, down):
    """A router and its experts: every size comes from that of ``x``."""
    weights, selected = torch.topk(F.softmax(x @ router, dim=-1), 2, dim=-1)
    return loop_r(x, selected, weights / weights.sum(-1, keepdim=True), gate_up, down)


@pytest.mark.slow
def test_two_lengths_take_one_more_compile_and_no_third():
    run = compiled(routed_block)
    router = torch.randn(WIDTH, EXPERTS, dtype=torch.float64, requires_grad=True)
    for tokens in (11, 7, 3, 11):
        x, _, *weights = inputs_for(torch.zeros(tokens, 2, dtype=torch.int64))
        expected = result_and_gradients(routed_block, [x, router, *weights])
        for want, got in zip(expected, result_and_gradients(run.call, [x, router, *weights]), strict=True):
            torch.testing.assert_close(got, want)
    assert len(run.graphs) == 2
    assert_grouped(run)


def test_without_gradients():
    selected = routings()["spread"]
    inputs = inputs_for(selected)
    run = compiled(loop_r)
    with torch.no_grad():
        torch.testing.assert_close(run.call(*_with(selected, inputs)), loop_r(*_with(selected, inputs)))
    assert_grouped(run)


def test_frozen_weights_get_no_gradient():
    selected = routings()["spread"]
    inputs = inputs_for(selected)
    for weight in inputs[2:]:
        weight.requires_grad_(False)
    run = compiled(loop_r)
    assert_close_to_eager(loop_r, run.call, selected, inputs)
    assert_grouped(run)


def test_under_checkpointing():
    def loop(x, selected, *rest):
        return torch.utils.checkpoint.checkpoint(loop_r, torch.tanh(x), selected, *rest, use_reentrant=False).sin()

    selected = routings()["one expert empty"]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_grouped(run)


def test_autocast_around_the_compiled_call():
    selected = routings()["spread"]
    inputs = inputs_for(selected, dtype=torch.float32)
    run = compiled(loop_r)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close_to_eager(loop_r, run.call, selected, inputs, rtol=0.1, atol=0.1)
    assert_grouped(run)


@pytest.mark.slow
def test_two_runs_are_bitwise_equal():
    selected = routings()["spread"]
    inputs = inputs_for(selected, dtype=torch.float32)
    run = compiled(loop_r)
    first, second = (result_and_gradients(lambda *a: run.call(a[0], selected, *a[1:]), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_two_layers_in_one_graph():
    def loop(x, selected, *rest):
        return loop_r(torch.tanh(loop_r(x, selected, *rest)), selected.flip(0), *rest)

    selected = routings()["spread"]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_grouped(run, loops=2)


@pytest.mark.slow
def test_inductor_takes_the_graph():
    selected = routings()["one expert empty"]
    run = compiled(loop_r, compiler="inductor")
    assert_close_to_eager(loop_r, run.call, selected, inputs_for(selected, dtype=torch.float32), rtol=1e-4, atol=1e-4)
    assert_grouped(run)


class Expert(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=bias, dtype=torch.float64) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH, bias=bias, dtype=torch.float64)

    def forward(self, rows):
        return self.w2(F.gelu(self.w1(rows)) * self.w3(rows))


class ModuleListLoop(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.experts = nn.ModuleList(Expert(bias) for _ in range(EXPERTS))

    def forward(self, x, selected, weights):
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            slot, token = torch.where(mask[index])
            out.index_add_(0, token, expert(x[token]) * weights[token, slot].unsqueeze(-1))
        return out


@pytest.mark.parametrize("bias", [False, True])
def test_a_module_list_uses_its_weights_where_they_are(bias):
    model = ModuleListLoop(bias)
    selected = routings()["spread"]  # every expert has rows, so that eager has a gradient for each
    inputs = inputs_for(selected)[:2]
    run = compiled(model)
    assert_close_to_eager(model, run.call, selected, [*inputs])
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    result_and_gradients(lambda *a: model(a[0], selected, *a[1:]), inputs)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        # run.call was second in the comparison above, and added to eager's gradient.
        torch.testing.assert_close(gradients[name], 2 * parameter.grad)
    assert_grouped(run)
    assert count(run.graph, glue.grouped_linear_list.default) == 3
    assert count(run.graph, torch.stack) == 0


def body_with(step):
    """A loop whose body is ``step(rows, expert)``; ``step`` may use ``gate_up`` and ``down``."""

    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        for expert in range(EXPERTS):
            slot, token = torch.where(mask[expert])
            out.index_add_(0, token, step(x[token], expert, gate_up, down) * weights[token, slot, None])
        return out

    return loop


STEPS = {
    "matmul with the layout of gpt_oss": lambda r, e, g, d: torch.tanh(r @ g[e].t()[:, :INNER]) @ d[e].transpose(0, 1),
    "a bias for each expert": lambda r, e, g, d: F.silu(r @ g[e].T + g[e, :, 0])[..., ::2] @ d[e].T + d[e][:, 0],
    "interleaved and clamped": lambda r, e, g, d: F.linear(
        (F.linear(r, g[e])[..., 1::2].clamp(min=-1, max=1) + 1) * F.linear(r, g[e])[..., ::2].clamp(max=1), d[e]
    ),
    "layer norm and softmax of a row": lambda r, e, g, d: F.layer_norm(r, (WIDTH,)) * F.softmax(r, dim=-1),
    "mean square of a row": lambda r, e, g, d: r * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + 1e-6),
    "parts and cat": lambda r, e, g, d: torch.cat(r.split(WIDTH // 2, dim=-1)[::-1], dim=-1),
    "one matrix for all": lambda r, e, g, d: r @ g[0, :WIDTH] + g[e, 0],
    "low rank": lambda r, e, g, d: (r @ (g[e, :2].T * 0.5)) @ g[e, 2:4],
    "number of rows in a reshape": lambda r, e, g, d: (
        r.view(r.shape[0], 2, WIDTH // 2).sum(1, keepdim=True).expand(-1, 2, -1).reshape(r.shape[0], WIDTH)
    ),
    "in chunks by squeeze": lambda r, e, g, d: r.unsqueeze(1).tanh().squeeze(1),
}


@pytest.mark.parametrize("name", one_in(3, STEPS))
def test_row_wise_bodies(name):
    loop = body_with(STEPS[name])
    selected = routings()["one expert empty"]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_grouped(run)


def test_weights_in_the_middle_of_the_body():
    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, slot = torch.nonzero(selected == expert, as_tuple=True)
            out.index_add_(0, token, torch.tanh(weights[token, slot][:, None] * x[token]))
        return out

    selected = routings()["spread"]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_grouped(run)


def test_dense_routing_weights_by_token_and_expert():
    def dense(x, selected, weights, gate_up, down):
        routing = x[:, :EXPERTS].sigmoid()
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            out.index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]) * routing[token, expert, None])
        return out

    for routing in ("spread", "an expert twice in a token"):
        torch._dynamo.reset()
        selected = routings()[routing]
        run = compiled(dense)
        assert_close_to_eager(dense, run.call, selected, inputs_for(selected))
        assert_grouped(run)


def test_ids_of_no_expert_select_nothing():
    def loop(x, selected, weights, gate_up, down):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, slot = torch.where(selected == expert)
            rows = F.linear(x[token], gate_up[expert, :WIDTH]) / gate_up[expert, :, 1].exp()[:WIDTH]
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out

    selected = routings()["spread"].clone()
    selected[0, 0], selected[1], selected[2, 1] = -1, EXPERTS, 7
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_grouped(run)


def test_an_accumulator_with_something_in_it():
    def loop(x, selected, weights, gate_up, down):
        out = x * 2
        view = out.view(-1, WIDTH)
        for expert in range(EXPERTS):
            token, _ = torch.where(selected == expert)
            view.index_add_(0, token, F.linear(x[token], gate_up[expert, :WIDTH]))
        return out * 2, view

    selected = routings()["spread"]
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, inputs_for(selected))
    assert_grouped(run)


def _with(selected, inputs):
    return [inputs[0], selected, *inputs[1:]]
