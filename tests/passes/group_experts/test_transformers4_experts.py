"""Unmodified models of transformers 4 with their loops (H4, RG, G, SPLIT); ``make test-transformers4`` installs it."""

import pytest
import torch

from tests.captured import compile_with_glue, count
from tests.passes.group_experts.model_sizes import GROUPS, LATENT, SMALL

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith("4."), reason="transformers 4 writes its experts' loops in other ways"
)

MODELS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "deepseek_v3": {**LATENT, **GROUPS},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4},
}


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_without_nonzero(name):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **MODELS[name]}, num_experts_per_tok=2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 64, (2, 9))
    target = torch.randn(2, 9, 64)

    def step(call):
        model.zero_grad()
        logits = call(input_ids=ids, use_cache=False).logits
        (logits * target).sum().backward()
        # An expert of a ModuleList without tokens has no gradient in eager, and zeros in the grouped form.
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        return [logits.detach(), *(grad.clone() for grad in grads)]

    expected = step(model)
    run = compile_with_glue(model, fullgraph=False, passes={"group_experts": True})
    for want, got in zip(expected, step(run.call), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert run.counts["experts_grouped"] == (
        16 if name == "granitemoe" else 8
    )  # its two products are loops of their own
    assert count(run.graph, torch.nonzero, "nonzero") == 0
