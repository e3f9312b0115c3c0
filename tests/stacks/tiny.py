"""Models, tokenizers and data that need no network: tiny, random, the same for the same seed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

TRAINING = {
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Arguments of transformers' Trainer, and of those that inherit from it."""

VOCABULARY = 64
LAYERS = 1
PAD, BEGIN, END = 0, 1, 2


def causal_model(seed: int = 0, **changes: Any) -> Any:
    """A causal language model of LAYERS layers, its heads grouped."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}
    # With a cache transformers does not tell the documents of a row apart; its Trainer switches the cache off.
    config = transformers.LlamaConfig(**{**sizes, **heads, **tokens, "use_cache": False, **changes})
    return transformers.LlamaForCausalLM(config)


def tokenizer() -> Any:
    """Of words ``w3`` to ``w63``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"<pad>": PAD, "<s>": BEGIN, "</s>": END}
    words = {**special, **{f"w{i}": i for i in range(len(special), VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def words(generator: random.Random, shortest: int, longest: int) -> str:
    return " ".join(f"w{generator.randrange(3, VOCABULARY)}" for _ in range(generator.randint(shortest, longest)))


def texts(rows: int, shortest: int = 4, longest: int = 20) -> Any:
    """A data set of documents of random lengths: ``{"text": ...}``."""
    generator = random.Random(0)
    return datasets.Dataset.from_list([{"text": words(generator, shortest, longest)} for _ in range(rows)])


def logged(trainer: Any, name: str = "loss") -> torch.Tensor:
    """What a Trainer has logged by ``name``, in order."""
    return torch.tensor([entry[name] for entry in trainer.state.log_history if name in entry])


def token_rows(rows: int, shortest: int = 4, longest: int = 20) -> Any:
    """The same, tokenized: ``{"input_ids": ...}``."""
    encode = tokenizer()
    return datasets.Dataset.from_list(
        [{"input_ids": encode(row["text"])["input_ids"]} for row in texts(rows, shortest, longest)]
    )
