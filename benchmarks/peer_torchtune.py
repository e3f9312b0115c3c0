"""torchtune's models in benchmarks.end_to_end, set up as its recipes for one device do with ``compile: True``.

Its own builders, weights through its own conversion of checkpoints, each layer compiled by itself, its loss that makes
the logits in chunks, and the mask of its packed data sets: blocks for flex_attention, made in each step as its collator
makes them, or a dense mask without a GPU. Layers are checkpointed where the row's are. Adapters are in bf16, too.

Qwen3 and that loss are in torchtune's main branch and in no release.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.end_to_end_rows import Size, Workload
from benchmarks.peers import (
    Adapters,
    Outcome,
    adapters_of,
    base_of,
    checkpoint_of,
    imported,
    published,
    targets_of,
    with_lengths,
)

HOW = "install torchtune of its main branch (github.com/pytorch/torchtune), and torchao"
TRAINED = ("qwen3-bf16", "llama-lora", "qwen3-8b-lora", "qwen3-14b-lora")
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""torchtune's names of what transformers calls so."""
FEED_FORWARD = frozenset(("gate_proj", "up_proj", "down_proj"))


class Recipe(nn.Module):
    """What a recipe does with a batch, up to the loss."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, lengths: Tensor) -> Outcome:
        mask = _torchtune("modules.attention_utils").packed_block_causal_mask([lengths])
        hidden = self.model(input_ids, mask=mask, input_pos=position_ids)
        return Outcome(self.loss(hidden, targets_of(labels)))


def build(row: str, size: Size, device: str, compiler: str) -> Workload:
    """What the row trains, compiled.

    Raises:
        ImportError: torchtune is missing, or too old.
        ValueError: torchtune has no such row here.
    """
    training = _torchtune("training")
    row_has = published("torchtune", row, TRAINED, size, device)
    adapters = adapters_of(row_has)
    family = {"llama": _llama, "qwen3": _qwen3}[row_has.config.model_type]
    with training.set_default_dtype(base_of(row_has).dtype), torch.device(device):
        model, weights = family(row_has, adapters, max(size.tokens, 4096))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or any("lora" not in name for name in missing):
        raise ValueError(f"torchtune's model has other weights than the row: {missing}, {unexpected}")
    if adapters:
        peft = _torchtune("modules.peft")
        peft.set_trainable_params(model, peft.get_adapter_params(model))

    os.environ["TORCH_COMPILE_BACKEND"] = compiler
    training.compile_model(model, verbose=False)
    layers = nn.ModuleList(model.layers)
    if base_of(row_has).is_gradient_checkpointing:
        kind = _torchtune("modules").TransformerSelfAttentionLayer
        training.set_activation_checkpointing(model, auto_wrap_policy={kind})
    loss = _torchtune("modules.loss").LinearCrossEntropyLoss()
    loss.set_model_output(model)
    training.compile_loss(loss, verbose=False)
    return replace(row_has, model=Recipe(model, loss).train(), layers=layers, batch=with_lengths(row_has.batch))


def _qwen3(row_has: Workload, adapters: Adapters | None, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    models = _torchtune("models.qwen3._component_builders")
    config = row_has.config
    sizes = _sizes(config, length) | {"head_dim": config.head_dim, "q_norm": True, "k_norm": True}
    sizes |= dict.fromkeys(("q_proj_bias", "k_proj_bias", "v_proj_bias"), False)
    convert = _torchtune("models.qwen3._convert_weights").qwen3_hf_to_tune
    weights = convert(checkpoint_of(row_has), tie_word_embeddings=config.tie_word_embeddings)
    return _built(models.qwen3, models.lora_qwen3, sizes, adapters), weights


def _llama(row_has: Workload, adapters: Adapters | None, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    models = _torchtune("models.llama3_2")
    config = row_has.config
    sizes = _sizes(config, length) | {"scale_factor": 1}  # the row's rotary frequencies are not scaled
    heads = {"num_heads": sizes["num_heads"], "num_kv_heads": sizes["num_kv_heads"], "dim": sizes["embed_dim"]}
    weights = _torchtune("models.convert_weights").hf_to_tune(checkpoint_of(row_has), **heads)
    return _built(models.llama3_2, models.lora_llama3_2, sizes, adapters), weights


def _sizes(config: Any, length: int) -> dict[str, Any]:
    """The arguments of each builder; positions are below ``length``."""
    return {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "embed_dim": config.hidden_size,
        "intermediate_dim": config.intermediate_size,
        "max_seq_len": length,
        "norm_eps": config.rms_norm_eps,
        "rope_base": config.rope_parameters["rope_theta"],
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _built(full: Any, with_lora: Any, sizes: dict[str, Any], adapters: Adapters | None) -> nn.Module:
    if adapters is None:
        return full(**sizes)
    return with_lora(
        lora_attn_modules=[ours for theirs, ours in ATTENTION.items() if theirs in adapters.targets],
        apply_lora_to_mlp=adapters.targets >= FEED_FORWARD,
        lora_rank=adapters.rank,
        lora_alpha=adapters.alpha,
        **sizes,
    )


def _torchtune(module: str) -> Any:
    return imported(f"torchtune.{module}", "torchtune", HOW)
