"""A small Qwen3, dense or with experts, that trains on packed documents, and the batches that it trains on.

The model is what users of variable-length kernels run today: transformers hands ``position_ids`` to every layer, and
every layer's attention rebuilds ``cu_seqlens`` and ``max_seqlen`` from them. Its experts are computed one after the
other in a loop, as in the code that most such models are published with.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    DataCollatorWithFlattening,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from demo.varlen_attention import packed_attention

ATTENTION = "packed_varlen"
BEGIN, END = 256, 257
VOCABULARY = 258

REPOSITORY = Path(__file__).resolve().parent.parent
TEXT_SUFFIXES = (".md", ".py", ".toml", ".txt")
MIN_DOCUMENT = 16

# A name that AttentionMaskInterface does not know: transformers then builds no dense mask.
AttentionInterface.register(ATTENTION, packed_attention)

Batch = dict[str, Tensor]


def packed_qwen3(
    layers: int = 4,
    checkpointing: bool = True,
    lora: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    hidden: int = 128,
    device: str | torch.device = "cpu",
    experts: int = 0,
    vocabulary: int = VOCABULARY,
) -> nn.Module:
    """A Qwen3 in training mode, its weights drawn from ``seed``.

    Args:
        layers: number of decoder layers.
        checkpointing: recompute each layer in backward (``gradient_checkpointing_enable()``).
        lora: freeze the random base and train rank-8 adapters on all linears, the embedding and the output layer.
        dtype: of the base weights; adapters of a half-precision base are fp32, as peft makes them.
        seed: of weights and adapters. The caller's random state is left as it was.
        hidden: hidden size, a multiple of 64: heads are 32 wide, and two share a key/value head.
        vocabulary: number of token ids; by default those of bytes.
        experts: 0 for a dense MLP in each layer, or the number of experts, of which each token takes four.
    """
    if hidden < 64 or hidden % 64:
        raise ValueError(f"hidden must be a positive multiple of 64, not {hidden}")
    heads = hidden // 32
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "use_cache": False,
    }
    config: Any = Qwen3Config(**sizes)
    if experts:
        config = Qwen3MoeConfig(
            **sizes, num_experts=experts, num_experts_per_tok=4, moe_intermediate_size=hidden, norm_topk_prob=True
        )
        config._experts_implementation = "eager"
    config._attn_implementation = ATTENTION
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM)(config).to(dtype)
        if checkpointing:
            model.gradient_checkpointing_enable()
        if lora:
            from peft import LoraConfig, get_peft_model

            # The vocabulary is new to the (random) base, so its embedding and output layer are trained whole.
            whole = ["embed_tokens", "lm_head"]
            adapters = LoraConfig(r=8, target_modules="all-linear", modules_to_save=whole, task_type="CAUSAL_LM")
            model = get_peft_model(model, adapters)
    return model.to(device).train()


def read_documents(folder: Path = REPOSITORY) -> list[bytes]:
    """The paragraphs (parted by blank lines) of all text files under ``folder``, in the order of the files' names.

    Hidden folders are left out, and so are paragraphs shorter than ``MIN_DOCUMENT`` bytes.
    """
    documents = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix in TEXT_SUFFIXES and not hidden and path.is_file():
            paragraphs = path.read_bytes().split(b"\n\n")
            documents += [text for text in paragraphs if len(text) >= MIN_DOCUMENT]
    return documents


def packed_batches(
    steps: int,
    tokens: int = 512,
    seed: int = 0,
    documents: Sequence[bytes] | None = None,
    device: str | torch.device = "cpu",
    prompt: float = 0.0,
) -> list[Batch]:
    """``steps`` batches of documents flattened into one row of exactly ``tokens`` tokens.

    Documents are shuffled by ``seed`` and repeat when they run out; the last one of a batch is cut to fit. Their number
    and their lengths differ from batch to batch.

    Args:
        documents: texts to pack; by default this repository's own (``read_documents()``).

        prompt: the share of each document, from its start, that asks, and is no part of the loss.

    Returns:
        per batch ``input_ids``, ``labels`` (-100 in prompts, and at each document's first token) and ``position_ids``
        (0 at the first token), all int64 ``[1, tokens]``.
    """
    shuffled = list(read_documents() if documents is None else documents)
    if not shuffled:
        raise ValueError("there are no documents to pack")
    random.Random(seed).shuffle(shuffled)
    stream = cycle(shuffled)
    collate = DataCollatorWithFlattening()
    return [
        {name: tensor.to(device) for name, tensor in collate(list(_fill(stream, tokens, prompt))).items()}
        for _ in range(steps)
    ]


def _fill(stream: Iterator[bytes], tokens: int, prompt: float) -> Iterator[dict[str, list[int]]]:
    room = tokens
    while room > 0:
        token_ids = [BEGIN, *next(stream), END][:room]
        room -= len(token_ids)
        asked = int(prompt * len(token_ids))
        yield {"input_ids": token_ids, "labels": [-100] * asked + token_ids[asked:]}
