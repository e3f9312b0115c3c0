"""Unmodified models of transformers: the mask goes, outputs and all gradients stay those of eager."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import versions
from tests.passes.specialize_attention.attention import LENGTH, POSITIONS, counts, specialized, square_tensors
from tests.slow import one_in, slow_but

transformers = pytest.importorskip("transformers")

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
MODELS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {
        "num_hidden_layers": 2,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {"num_hidden_layers": 2, "sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "modernbert": {"num_hidden_layers": 2, "local_attention": 6, "global_attn_every_n_layers": 2, "sep_token_id": 2},
}


def tiny(kind, attention):
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, **MODELS[kind]})
    kind_of_model = transformers.AutoModelForMaskedLM if kind == "modernbert" else transformers.AutoModelForCausalLM
    return kind_of_model.from_config(config, attn_implementation=attention)


def step(model, call, batch):
    model.zero_grad()
    logits = call(**batch).logits
    generator = torch.Generator().manual_seed(1)
    (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_steps_are_close(model, run, batch):
    # The CPU's fused kernel has wrong gradients for queries whose keys are all hidden by finite numbers.
    with sdpa_kernel(SDPBackend.MATH):
        expected = step(model, model, batch)
    actual = step(model, run.call, batch)
    assert len(expected) == len(actual) > 5
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def batch_of(rows=1, packed=True):
    batch = {"input_ids": torch.randint(3, 64, (rows, LENGTH))}
    if packed:
        batch["position_ids"] = POSITIONS.repeat(rows, 1)
    return batch


def assert_forms(run, forms):
    """transformers 4 makes masks under vmap, whose code is not followed: there they are read when the graph runs."""
    if versions.TRANSFORMERS_4:
        assert counts(run) == {"listed": sum(forms.values())}
        return
    assert counts(run) == forms
    assert square_tensors(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("attention", slow_but(("eager",), ["sdpa", "eager"]))
@pytest.mark.parametrize("kind", slow_but(("gemma3_text",), ["llama", "qwen3", "mistral", "gemma3_text"]))
def test_packed_documents(kind, attention):
    model = tiny(kind, attention)
    run = specialized(model, eager=False)
    batch = batch_of(rows=2)
    assert_steps_are_close(model, run, batch)
    assert_forms(run, {"packed": model.config.num_hidden_layers})
    # Editing one document leaves the others as they are, bit by bit.
    before = run.call(**batch).logits
    batch["input_ids"][:, 4:10] = 3
    after = run.call(**batch).logits
    assert torch.equal(after[:, :4], before[:, :4])
    assert torch.equal(after[:, 10:], before[:, 10:])
    assert not torch.equal(after[:, 4:10], before[:, 4:10])
    assert len(run.graphs) == 1


@pytest.mark.parametrize("attention", slow_but(("eager",), ["sdpa", "eager"]))
@pytest.mark.parametrize(
    ("kind", "forms"),
    [
        pytest.param("llama", {"causal": 1}, marks=pytest.mark.slow),
        pytest.param("mistral", {"packed": 1}, marks=pytest.mark.slow),
        ("gemma3_text", {"packed": 1, "causal": 1}),
    ],
)
def test_whole_rows(kind, forms, attention):
    model = tiny(kind, attention)
    run = specialized(model, eager=False)
    assert_steps_are_close(model, run, batch_of(rows=2, packed=False))
    assert_forms(run, forms)


@pytest.mark.slow
def test_gradient_checkpointing():
    model = tiny("qwen3", "sdpa").train()
    model.gradient_checkpointing_enable()
    run = specialized(model, eager=False)
    assert_steps_are_close(model, run, batch_of())
    assert_forms(run, {"packed": 1})


@pytest.mark.slow
def test_an_encoder_with_a_window_on_both_sides():
    model = tiny("modernbert", "sdpa").eval()
    run = specialized(model, eager=False)
    assert_steps_are_close(model, run, batch_of(rows=2, packed=False))
    found = counts(run)
    found.pop("unmasked", None)  # the whole layer: transformers passes it a mask on some releases of torch
    assert found == {"packed": 1}
    assert square_tensors(run) == []


@pytest.mark.parametrize("side", one_in(2, ["left", "right"]))
@pytest.mark.parametrize("kind", slow_but(("mistral",), ["llama", "mistral", "modernbert"]))
def test_padding(kind, side):
    """Logits at padded places too."""
    model = tiny(kind, "sdpa").eval()
    run = specialized(model, eager=False)
    batch = batch_of(rows=2, packed=False)
    batch["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
    batch["attention_mask"][0, slice(3) if side == "left" else slice(-3, None)] = 0
    assert_steps_are_close(model, run, batch)
    assert_forms(run, {"packed": model.config.num_hidden_layers})
    before = run.call(**batch).logits
    batch["attention_mask"][0] = 1
    batch["attention_mask"][1, 5:] = 0
    assert_steps_are_close(model, run, batch)
    assert not torch.equal(run.call(**batch).logits, before)
    assert len(run.graphs) == 1


@pytest.mark.slow
def test_padding_added_to_the_scores_is_read():
    """Queries that see no key get what eager gives them."""
    model = tiny("llama", "eager").eval()
    run = specialized(model, eager=False)
    batch = batch_of(rows=2, packed=False)
    batch["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
    batch["attention_mask"][0, :3] = 0
    assert_steps_are_close(model, run, batch)
    assert counts(run) == {"listed": 1}


class WithoutExperts(torch.nn.Module):
    """In place of experts: torch 2.11 cannot trace the backward of those of transformers 5.17 on a CPU."""

    def forward(self, x):
        return x, None


@versions.SINKS_BEHIND_VMAP.mark
def test_attention_sinks():
    model = tiny("gpt_oss", "eager")
    for layer in model.model.layers:
        layer.mlp = WithoutExperts()
    run = specialized(model, eager=False)
    assert_steps_are_close(model, run, batch_of(packed=False))
    assert counts(run) == {"packed": 1}


@pytest.mark.slow
def test_soft_caps():
    model = tiny("gemma2", "eager").eval()
    run = specialized(model, eager=False)
    assert_steps_are_close(model, run, batch_of(rows=2, packed=False))
    assert counts(run) == {"listed": 2}


OTHERS = {
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 1},
    "gpt_neo": {"hidden_size": 32, "num_heads": 4, "num_layers": 1, "attention_types": [[["global"], 1]]},
    "gpt_neox_japanese": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 1},
}


@pytest.mark.parametrize("kind", slow_but(("bloom", "gpt_neo"), list(OTHERS)))
def test_masks_beside_other_changes_of_the_scores(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=64, use_cache=False, **OTHERS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    run = specialized(model, eager=False)
    assert_steps_are_close(model, run, batch_of(rows=2, packed=False))
    assert sum(counts(run).values()) == 1


@pytest.mark.parametrize("kind", slow_but(("xglm",), ["trocr", "xglm"]))
def test_rows_and_heads_that_are_merged(kind):
    settings = {"d_model": 32, "vocab_size": 64, "max_position_embeddings": 64, "dropout": 0.0, "use_cache": False}
    if kind == "trocr":
        settings |= {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
        model = transformers.TrOCRForCausalLM(transformers.TrOCRConfig(**settings))
    else:
        settings |= {"num_layers": 1, "attention_heads": 4, "ffn_dim": 64}
        model = transformers.XGLMForCausalLM(transformers.XGLMConfig(**settings))
    model.eval()
    run = specialized(model, eager=False)
    assert_steps_are_close(model, run, batch_of(rows=2, packed=False))
    assert counts(run) == {"causal": 1}
