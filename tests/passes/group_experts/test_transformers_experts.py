"""Unmodified transformers models with their eager expert loops: one graph, no nonzero, eager's gradients."""

import pytest
import torch

from tests.captured import compile_with_glue, count
from tests.passes.group_experts.model_sizes import GROUPS, LATENT, SMALL
from tests.slow import slow_but

transformers = pytest.importorskip("transformers", minversion="5.0")

MODELS = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "phimoe": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "deepseek_v2": {**LATENT, **GROUPS, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, **GROUPS},
    "glm4_moe": {**GROUPS, "n_group": 1, "head_dim": 8},
    "jamba": {
        "num_experts": 4,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "use_mamba_kernels": False,
    },
}


def model_of(name, **sizes):
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **MODELS[name], **sizes}, num_experts_per_tok=2)
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager", attn_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:  # experts start as zeros in some
            torch.nn.init.normal_(parameter, std=0.1)
    return model.float().eval()  # phimoe draws random numbers in training


@pytest.mark.parametrize("name", slow_but(("mixtral",), MODELS))
def test_one_graph_without_nonzero(name):
    model = model_of(name)
    ids = torch.randint(0, 64, (2, 9))
    target = torch.randn(2, 9, 64)

    def step(call):
        model.zero_grad()
        logits = call(input_ids=ids, use_cache=False).logits
        (logits * target).sum().backward()
        return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    expected = step(model)
    run = compile_with_glue(model, fullgraph=False, passes={"group_experts": True})
    for want, got in zip(expected, step(run.call), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert run.counts == {"loops_grouped": 2, "experts_grouped": 8}
    assert count(run.graph, torch.nonzero, "nonzero") == 0
    assert not [n for n in run.graph.graph.nodes if n.target is torch.where and len(n.args) == 1]


@pytest.mark.slow
def test_nonzero_is_not_run_forward_or_backward():
    model = model_of("qwen3_moe", num_experts=8)
    ids = torch.randint(0, 64, (2, 9))
    call = compile_with_glue(model, passes={"group_experts": True}).call
    call(input_ids=ids, use_cache=False).logits.sum().backward()
    with torch.profiler.profile() as profile:
        call(input_ids=ids, use_cache=False).logits.sum().backward()
    names = [event.name for event in profile.events()]
    assert "glue::expert_sort" in names
    assert "aten::nonzero" not in names
