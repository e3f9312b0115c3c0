"""Unsloth's models in benchmarks.end_to_end, loaded as its notebooks do and called as its trainer does for packing.

FastLanguageModel from a local folder, without a network: its own classes and kernels, its adapters, its checkpoints
that are offloaded ("unsloth") where the row's are, its loss without logits, the documents' lengths as its collator has
them, and the precision that its trainer chooses. Weights are in 16 bits, or in 4 where the row's are. It patches torch
and transformers in the process in which it is imported.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.end_to_end_rows import Size, Workload
from benchmarks.peers import Outcome, adapters_of, base_of, checkpoint_of, imported, published, with_lengths

HOW = "install unsloth and unsloth_zoo, for these versions of torch and transformers"
TRAINED = (
    *("qwen3-bf16", "llama-lora", "qwen3-lora", "llama-8b-lora", "qwen3-8b-lora", "qwen3-14b-lora"),
    *("qwen3-bf16-padded", "qwen3-8b-lora-padded", "qwen3-bf16-group"),
)
SETTINGS = {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}


class Step(nn.Module):
    """What the trainer does with a batch, up to the loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, lengths: Tensor | None = None, **inputs: Tensor) -> Outcome:
        packed = {} if lengths is None else {"packed_seq_lengths": lengths}
        found = self.model(**inputs, **packed, use_cache=False)
        return Outcome(found.loss)


def build(row: str, size: Size, device: str, compiler: str) -> Workload:
    """What the row trains. Unsloth compiles parts of it by itself, whatever ``compiler`` is.

    Raises:
        ImportError: unsloth is missing, or for other packages than there are.
        ValueError: unsloth has no such row here.
    """
    written = os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())  # code that it makes, beside Inductor's
    for name, value in {**SETTINGS, "UNSLOTH_COMPILE_LOCATION": f"{written}/unsloth"}.items():
        os.environ.setdefault(name, value)
    unsloth = imported("unsloth", "unsloth", HOW)  # before transformers, which it patches
    in_four_bits = "-qlora" in row  # which it makes of published weights by itself
    row_has = published("unsloth", row.replace("-qlora", "-lora"), TRAINED, size, device)
    adapters = adapters_of(row_has)
    keeps_all = not base_of(row_has).is_gradient_checkpointing
    with tempfile.TemporaryDirectory() as folder:
        _save(row_has, Path(folder))
        row_has = replace(row_has, model=nn.Module(), layers=nn.ModuleList())  # that memory is Unsloth's now
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=max(size.tokens, 4096),
            dtype=torch.bfloat16,
            load_in_4bit=in_four_bits,
            full_finetuning=adapters is None,
            use_gradient_checkpointing=False if keeps_all else "unsloth",
            local_files_only=True,
        )
    if adapters:
        model = unsloth.FastLanguageModel.get_peft_model(
            model,
            r=adapters.rank,
            lora_alpha=adapters.alpha,
            target_modules=sorted(adapters.targets),
            lora_dropout=0,
            bias="none",
            use_gradient_checkpointing=False if keeps_all else "unsloth",
        )
    if device == "cuda":  # as its trainer does for packed documents
        imported("unsloth.utils.hf_packed_attention", "unsloth", HOW).enable_hf_packed_attention()
    base = model.get_base_model() if adapters else model
    return replace(
        row_has,
        model=Step(model).train(),
        layers=base.model.layers,
        batch=row_has.batch if row.endswith(("-padded", "-group")) else with_lengths(row_has.batch),
        around=_precision(device),
    )


def _save(workload: Workload, folder: Path) -> None:
    """Weights, configuration, and a tokenizer, without which Unsloth loads no model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    base_of(workload).save_pretrained(folder, state_dict=checkpoint_of(workload))
    words = Tokenizer(models.WordLevel({f"word{each}": each for each in range(8)}, unk_token="word0"))
    special = {"unk_token": "word0", "bos_token": "word1", "eos_token": "word2", "pad_token": "word3"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def _precision(device: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Its trainer has autocast, but where all weights are trained in bf16."""
    if os.environ.get("UNSLOTH_MIXED_PRECISION", "float32") == "bfloat16":
        return contextlib.nullcontext
    return partial(torch.autocast, device, dtype=torch.bfloat16)
