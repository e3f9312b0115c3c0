"""transformers' models and losses with fp64 wherever they say fp32, so that two runs can be compared to 1e-10."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

COMMON = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"experts_implementation": "eager"}
GPT2 = {"vocab_size": 53, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
T5 = {"vocab_size": 53, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {
    "vocab_size": 53,
    "d_model": 32,
    **{f"{part}_{what}": value for part in ("encoder", "decoder") for what, value in (("layers", 1), ("ffn_dim", 48))},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**COMMON, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", COMMON),
    "gemma2": ("Gemma2ForCausalLM", {**COMMON, **WINDOWS, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3ForCausalLM", {**COMMON, **WINDOWS}),
    "granite": ("GraniteForCausalLM", {**COMMON, "logits_scaling": 3.0}),
    "cohere": ("CohereForCausalLM", {**COMMON, "logit_scale": 0.3}),
    "phi3": ("Phi3ForCausalLM", COMMON),
    "mixtral": ("MixtralForCausalLM", {**COMMON, "num_local_experts": 2, "num_experts_per_tok": 1, **EXPERTS}),
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "opt": ("OPTForCausalLM", {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "bloom": ("BloomForCausalLM", {"vocab_size": 53, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}),
    "mpt": ("MptForCausalLM", {"vocab_size": 53, "d_model": 32, "n_layers": 2, "n_heads": 4, "use_cache": False}),
    "t5": ("T5ForConditionalGeneration", {**T5, "use_cache": False, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", {**BART, "dropout": 0.0, "use_cache": False}),
    "bert": ("BertForMaskedLM", {**COMMON, **NO_DROPOUT}),
}


def tiny(family: str, **settings: Any) -> nn.Module:
    """A random model of fp64."""
    transformers = pytest.importorskip("transformers")
    name, config = FAMILIES[family]
    prefix = name.partition("For")[0].removesuffix("LMHeadModel")
    kind = {"Gemma3": "Gemma3Text"}.get(prefix, prefix)
    found = getattr(transformers, f"{kind}Config")(**{**config, **settings})
    found._attn_implementation = "eager"
    modeling = in_fp64(f"transformers.models.{family}.modeling_{family}")
    model = getattr(modeling, name)(found).double().train()
    losses = in_fp64("transformers.loss.loss_utils")
    model.loss_function = losses.ForMaskedLMLoss if family == "bert" else losses.ForCausalLMLoss
    return model


@functools.cache
def in_fp64(name: str) -> ModuleType:
    """The module of that name, as a module of its own in which fp32 is fp64."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read().replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    exact = ModuleType(f"{name}_in_fp64")
    exact.__dict__.update(__package__=name.rpartition(".")[0], __file__=spec.origin)
    sys.modules[exact.__name__] = exact
    exec(compile(source, spec.origin, "exec"), exact.__dict__)
    return exact


def inputs_of(family: str, kind: str = "some") -> dict[str, torch.Tensor]:
    """Token ids and labels: ``some`` of them ignored, ``ignored`` all, of ``one`` token, or ``none``."""
    shape = {"one": (1, 1), "none": (0, 7)}.get(kind, (2, 7))
    ids = torch.randint(3, 53, shape)
    labels = torch.full_like(ids, -100) if kind == "ignored" else ids.masked_fill(torch.arange(shape[1]) % 4 == 1, -100)
    return {"input_ids": ids, "labels": labels}


def results_of(model: nn.Module, call: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """The loss and every gradient."""
    model.zero_grad(set_to_none=True)
    output = call(**inputs)
    output.loss.backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": output.loss.detach(), "logits": output.logits.detach().clone(), **found}
