"""Unmodified transformers models, tiny and random: they compile, match eager, and lose their repeated nodes."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from glue_compiler.backend import GlueBackend  # noqa: E402
from glue_compiler.report.session import Session  # noqa: E402

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
ALTERNATING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}


def gemma3():
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, **ALTERNATING))


def gpt_oss():
    config = transformers.GptOssConfig(**SMALL, **ALTERNATING, num_local_experts=4, num_experts_per_tok=2)
    return transformers.GptOssForCausalLM(config)


def qwen3_next():
    linear = {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")}
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "linear_attention"]}
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**SMALL, **linear, **heads, **experts, **layers)
    )


def mamba2():
    sizes = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16}
    return transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(vocab_size=128, hidden_size=64, num_hidden_layers=2, **sizes)
    )


def modernbert():
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    tokens = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    config = transformers.ModernBertConfig(**sizes, **tokens, num_attention_heads=4, local_attention=16)
    return transformers.ModernBertForMaskedLM(config)


def inputs_for(name):
    ids = torch.randint(3, 128, (2, 32))
    inputs = {"input_ids": ids, "labels": ids}
    if name not in ("mamba2", "modernbert"):
        inputs["use_cache"] = False
        inputs["position_ids"] = torch.cat([torch.arange(20), torch.arange(12)]).expand(2, -1).contiguous()
    return inputs


def step(model, call, inputs):
    model.zero_grad()
    loss = call(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


# What each model computes again: masks of two kinds, rotary tables, segment sums, chunk masks.
@pytest.mark.parametrize(
    ("build", "at_least", "compiler"),
    [
        pytest.param(gemma3, 25, "aot_eager", marks=pytest.mark.slow),
        pytest.param(gpt_oss, 15, "aot_eager", marks=pytest.mark.slow),
        pytest.param(mamba2, 10, "aot_eager", marks=pytest.mark.slow),
        pytest.param(modernbert, 6, "aot_eager", marks=pytest.mark.slow),
        # AOTAutograd's backward of this model runs under Inductor only, with or without glue (torch 2.13).
        pytest.param(qwen3_next, 2, "inductor", marks=pytest.mark.slow),
    ],
)
def test_it_compiles_matches_eager_and_reports_the_merged_nodes(build, at_least, compiler):
    torch.manual_seed(0)
    model, inputs, session = build().train(), inputs_for(build.__name__), Session()
    expected = step(model, model, inputs)
    # With their masks, which are what most of them compute again.
    passes = {"specialize_attention": False}
    options = {"compiler": compiler, "strict": True, "passes": passes}
    actual = step(model, torch.compile(model, backend=GlueBackend(session=session), options=options), inputs)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want)
    if compiler == "aot_eager":
        torch._dynamo.reset()
        without = torch.compile(
            model, backend="glue", options={**options, "passes": {**passes, "hoist_metadata": False}}
        )
        assert all(torch.equal(a, b) for a, b in zip(actual, step(model, without, inputs), strict=True))
    merged = sum(p.counts.get("merged", 0) for report in session.graphs for p in report.passes)
    assert merged >= at_least


def vision_tower():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(depth=1, embed_dim=32, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2)
    return Qwen2VisionTransformerPretrainedModel._from_config(config, attn_implementation="sdpa")


@pytest.mark.slow
def test_a_vision_tower_that_cannot_be_traced_with_data_dependent_capture_runs():
    """With the capture flags set by hand it raises; plain Dynamo breaks the graph."""
    tower, session = vision_tower(), Session()
    grid, pixels = torch.tensor([[1, 4, 4], [1, 8, 4]]), torch.randn(48, 96)
    expected = tower(pixels, grid_thw=grid).pooler_output
    compiled = torch.compile(tower, backend=GlueBackend(session=session), options={"compiler": "aot_eager"})
    assert torch.equal(compiled(pixels, grid_thw=grid).pooler_output, expected)
    assert any(event.retried for event in session.capture_events)
