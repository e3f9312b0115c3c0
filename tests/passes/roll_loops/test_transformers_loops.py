"""The gated delta rule as transformers writes it in torch: one graph for all lengths, as eager in fp32."""

from __future__ import annotations

import pytest
import torch

from tests.captured import compile_with_glue
from tests.passes.roll_loops.test_loops import rolled

transformers = pytest.importorskip("transformers")


def rule():
    try:
        from transformers.models.qwen3_next import modeling_qwen3_next as modeling
    except ImportError:
        pytest.skip("this transformers has no Qwen3-Next")
    return modeling.torch_chunk_gated_delta_rule


def given(length, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"query": (1, length, 2, 4), "key": (1, length, 2, 4), "value": (1, length, 4, 3)}
    sizes |= {"g": (1, length, 4), "beta": (1, length, 4)}
    made = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    made["g"], made["beta"] = -made["g"].abs(), made["beta"].sigmoid()
    return {name: each.requires_grad_() for name, each in made.items()}


def outcome(call, inputs, **how):
    out, state = call(**inputs, **how, output_final_state=True, use_qk_l2norm_in_kernel=True)
    loss = (out * out.cos()).sum() + state.sin().sum()
    return [out, state, *torch.autograd.grad(loss, list(inputs.values()))]


@pytest.mark.slow
def test_it_is_one_graph_for_all_lengths():
    fn = rule()
    run = compile_with_glue(fn, fullgraph=False, passes={"roll_loops": True})
    for length in (130, 203, 170, 300, 150):
        inputs = given(length, seed=length)
        how = {"chunk_size": 16}
        for got, want in zip(outcome(run.call, inputs, **how), outcome(fn, inputs, **how), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(run.graphs) == 2 == rolled(run)
