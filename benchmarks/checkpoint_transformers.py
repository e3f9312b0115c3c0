"""Unmodified transformers models for the offload benchmark, with LoRA by peft and their own gradient checkpointing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.checkpoint_decoder import Shape

FAMILIES = ("qwen3", "llama")  # transformers' model types


class LanguageModel(nn.Module):
    """Takes token ids ``[batch, tokens]`` and labels of the same sizes; returns the loss."""

    def __init__(self, family: str, shape: Shape, device: torch.device) -> None:
        import peft
        import transformers

        super().__init__()
        sizes = {
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_size,
            "max_position_embeddings": shape.tokens,
            "use_cache": False,
        }
        config = transformers.AutoConfig.for_model(family, **sizes)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
        self.model.enable_input_require_grads()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.train()

    def offload(self) -> None:
        """transformers' own: inputs of checkpoints lie on the host (5.17 and later)."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_base_model().model.layers

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=labels).loss


def tokens_of(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), device=device)
    return ids, ids
