"""Cases that a grouped loop computes as eager does: no tokens, strange strides, adapters on experts, several layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from glue_compiler.backend import GlueBackend
from glue_compiler.report.session import Session
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
from tests.passes.group_experts.model_sizes import SMALL


def test_no_tokens():
    selected = torch.zeros(0, 2, dtype=torch.int64)
    run = compiled(loop_r)
    assert_close_to_eager(loop_r, run.call, selected, inputs_for(selected))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_first_call(use_reentrant):
    """It counts what is saved in its forward, which is when the loop is compiled."""
    selected = routings()["spread"]
    run = compiled(loop_r)

    def checkpointed(*inputs):
        return checkpoint(run.call, *inputs, use_reentrant=use_reentrant)

    assert_close_to_eager(loop_r, checkpointed, selected, inputs_for(selected))
    assert_grouped(run)


@pytest.mark.parametrize("view", ["columns of a wider tensor", "transposed", "every second token", "expanded"])
def test_selections_of_any_strides(view):
    wide = torch.rand(12, EXPERTS, generator=torch.Generator().manual_seed(0)).argsort(-1)
    selected = {
        "columns of a wider tensor": wide[:, 1:3],
        "transposed": wide[:2].t(),
        "every second token": wide[::2, :2],
        "expanded": wide[:1, :2].expand(5, 2),
    }[view]
    assert not selected.is_contiguous()
    run = compiled(loop_r)
    assert_close_to_eager(loop_r, run.call, selected, inputs_for(selected))
    assert_grouped(run)


def test_adapters_on_stacked_weights():
    """``W + B @ A``, with the base frozen."""

    def loop(x, selected, weights, gate_up, down, up, low):
        return loop_r(x, selected, weights, gate_up + up @ low, down)

    selected = routings()["one expert empty"]
    x, weights, gate_up, down = inputs_for(selected)
    up = torch.randn(EXPERTS, 2 * INNER, 2, dtype=torch.float64, requires_grad=True)
    low = torch.randn(EXPERTS, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    run = compiled(loop)
    assert_close_to_eager(loop, run.call, selected, [x, weights, gate_up.detach(), down.detach(), up, low])
    assert_grouped(run)


class Adapted(nn.Module):
    """peft's linear: a frozen base and a product of two small matrices."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.base = nn.Linear(width_in, width_out, dtype=torch.float64).requires_grad_(False)
        self.low = nn.Linear(width_in, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, width_out, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.base(x) + 0.5 * self.up(self.low(x))


class AdaptedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(Adapted(WIDTH, INNER), nn.SiLU(), Adapted(INNER, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x, selected, weights):
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            slot, token = torch.where(mask[index])
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def test_adapters_on_a_module_list():
    model = AdaptedExperts()
    selected = routings()["spread"]
    inputs = inputs_for(selected)[:2]
    run = compiled(model)
    results = []
    for call in (model, run.call):
        model.zero_grad()
        found = result_and_gradients(lambda *a, call=call: call(a[0], selected, a[1]), inputs)
        results.append(found + [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    assert_grouped(run)
    assert count(run.graph, torch.ops.glue.grouped_linear_list.default) == 6


@pytest.mark.slow
def test_four_layers_compiled_one_by_one_compile_once():
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{**SMALL, "num_hidden_layers": 4}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    )
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", experts_implementation="eager")
    ids = torch.randint(0, 64, (1, 9))
    want = model(input_ids=ids, use_cache=False).logits
    want.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    session = Session()
    backend = GlueBackend(session=session)
    options = {"compiler": "aot_eager", "strict": True}
    for layer in model.model.layers:
        layer.compile(backend=backend, options=options)
    model.zero_grad()
    got = model(input_ids=ids, use_cache=False).logits
    got.sum().backward()
    torch.testing.assert_close(got, want)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    grouped = [graph for graph in session.graphs if any(p.counts.get("loops_grouped") for p in graph.passes)]
    assert len(grouped) == len(session.graphs) == 1
