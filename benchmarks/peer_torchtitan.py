"""torchtitan's Qwen3 in benchmarks.end_to_end, set up as its trainer does on one GPU with ``compile.enable``.

Its own model, weights through its own conversion of checkpoints, each block and the loss compiled, and attention within
documents (``block_causal``), through flex_attention or torch's varlen kernel, the mask made in each step as its trainer
makes it. torchtitan finds documents by the token that ends them, and positions go on over a whole row.

torchtitan 0.2.2 is the last release for torch 2.11; later ones need a newer torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.end_to_end_rows import Size, Workload
from benchmarks.peers import Outcome, checkpoint_of, imported, published, targets_of

HOW = "torchtitan 0.2.2 is for torch 2.11"
TRAINED = ("qwen3-bf16", "qwen3-autocast")
END = SimpleNamespace(eos_id=-1)
"""In the place of a tokenizer. The row's random ids end no document."""


class Step(nn.Module):
    """What the trainer does with a batch, up to the loss."""

    def __init__(self, model: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, ended_ids: Tensor) -> Outcome:
        masks = self.model.get_attention_masks(ended_ids, END)
        targets = targets_of(labels)
        return Outcome(self.loss(self.model(input_ids, masks), targets) / (targets != -100).sum())


def build(row: str, size: Size, device: str, compiler: str, attention: str = "flex") -> Workload:
    """What the row trains, compiled; ``attention`` is torchtitan's name for it, "flex" or "varlen".

    Raises:
        ImportError: torchtitan is missing, or for another torch.
        ValueError: torchtitan has no such row here.
    """
    qwen3 = _torchtitan("models.qwen3")
    row_has = published("torchtitan", row, TRAINED, size, device)
    config = row_has.config
    arguments = qwen3.Qwen3ModelArgs(
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        max_seq_len=size.tokens,
        enable_weight_tying=config.tie_word_embeddings,
        attn_type=attention,
        attn_mask_type="block_causal",
    )
    weights = checkpoint_of(row_has)
    dtype = next(iter(weights.values())).dtype
    with _torchtitan("tools.utils").set_default_dtype(dtype), torch.device(device):
        model = qwen3.Qwen3Model(arguments)
    model.load_state_dict(qwen3.Qwen3StateDictAdapter(arguments, None).from_hf(weights))

    job = _torchtitan("config").JobConfig()
    job.compile.enable, job.compile.backend = True, compiler
    job.activation_checkpoint.mode = "none"
    job.training.seq_len = size.tokens
    one = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size"), 1)
    layers = nn.ModuleList(model.layers.values())
    qwen3.parallelize_qwen3(model, _torchtitan("distributed").ParallelDims(**one), job)
    loss = _torchtitan("components.loss").build_cross_entropy_loss(job)
    return replace(row_has, model=Step(model, loss).train(), layers=layers, batch=_with_ends(row_has.batch))


def _with_ends(
    batch: Callable[[int, torch.Generator], dict[str, Tensor]],
) -> Callable[[int, torch.Generator], dict[str, Tensor]]:
    """The batches, with ``ended_ids``: the ids, the last of each document replaced by the token that ends one."""

    def made(tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
        found = batch(tokens, generator)
        is_last = torch.nn.functional.pad(found["position_ids"][:, 1:] == 0, (0, 1), value=True)
        return {**found, "ended_ids": found["input_ids"].masked_fill(is_last, END.eos_id)}

    return made


def _torchtitan(module: str) -> Any:
    return imported(f"torchtitan.{module}", "torchtitan", HOW)
