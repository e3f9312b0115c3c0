"""What the rows of benchmarks.end_to_end train: unmodified models of transformers, random weights, packed or padded.

A row is a published model's shape. Tiny sizes, to test the code, change numbers of heads, layers and experts, and
nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.packed_attention import random_lengths


@dataclass(frozen=True)
class Size:
    """``least`` to ``tokens`` tokens in a batch; ``layers`` None: the row's. ``is_tiny``: to test the code."""

    tokens: int
    least: int
    layers: int | None
    is_tiny: bool


@dataclass(frozen=True)
class Workload:
    """What a row trains.

    Attributes:
        layers: the decoder layers, for variants that compile each by itself.
        batch: a batch of so many tokens, padding among them; a generator draws its documents.
        around: the context of each forward.
        config: of the model, as transformers has it.
        token_flops: of products with weights, for one token; None: what the model's own weights say.
    """

    model: nn.Module
    layers: nn.ModuleList
    batch: Callable[[int, torch.Generator], dict[str, Tensor]]
    config: Any
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    token_flops: float | None = None


@dataclass(frozen=True)
class Row:
    """What is measured by default.

    Attributes:
        build: (size, device, transformers' name for the attention) → what is trained.
        layers: None: all that the published model has.
    """

    build: Callable[[Size, str, str], Workload]
    tokens: int = 8192
    layers: int | None = None


def qwen3_bf16(size: Size, device: str, attention: str) -> Workload:
    """Qwen3-0.6B's shape, weights in bf16."""
    return _packed(_causal_model("qwen3", size, device, attention), device)


def qwen3_autocast(size: Size, device: str, attention: str) -> Workload:
    """The same, weights in fp32, forward under autocast to bf16."""
    return _under_autocast(_packed(_causal_model("qwen3", size, device, attention, torch.float32), device), device)


def qwen3_8b_bf16(size: Size, device: str, attention: str) -> Workload:
    """Qwen3-8B's width in bf16, all weights trained: two layers, for what a head and a loss take."""
    return packed_model("qwen3_8b", size, device, attention)


def llama_bf16(size: Size, device: str, attention: str) -> Workload:
    """Llama-3.2-1B's shape, weights in bf16, all trained."""
    return _packed(_causal_model("llama", size, device, attention), device)


def llama_lora(size: Size, device: str, attention: str) -> Workload:
    """Llama-3.2-1B's shape in bf16, checkpointed, LoRA on its attention; adapters in fp32, as peft makes them."""
    import peft

    model = _causal_model("llama", size, device, attention)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=projections, task_type="CAUSAL_LM"))
    return replace(_packed(model, device), model=adapted)


def large_lora(family: str, size: Size, device: str, attention: str, dtype: torch.dtype = torch.bfloat16) -> Workload:
    """A model in ``dtype``, checkpointed, LoRA on all of its linear layers; adapters in it too, as FSDP2 asks."""
    import peft

    model = _causal_model(family, size, device, attention, dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapters = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return replace(_packed(model, device), model=adapted)


def large_qlora(family: str, size: Size, device: str, attention: str) -> Workload:
    """The same on a base of 4 bits: bitsandbytes' NF4, double quantisation, computed in bf16; a head in bf16."""
    import peft

    model = _causal_model(family, size, device, attention)
    _quantize(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapters = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return replace(_packed(model, device), model=adapted)


def large_lora_autocast(family: str, size: Size, device: str, attention: str) -> Workload:
    """The same, weights in fp32, forward under autocast to bf16."""
    return _under_autocast(large_lora(family, size, device, attention, torch.float32), device)


def gemma3_1b(size: Size, device: str, attention: str) -> Workload:
    """gemma-3-1b's shape in bf16: five layers with a window of 512 for each one without."""
    return _packed(_causal_model("gemma3_text", size, device, attention), device)


def qwen3_moe(size: Size, device: str, attention: str) -> Workload:
    """Qwen3-30B-A3B's shape in bf16: 128 experts, of which a token has eight."""
    return _packed(_causal_model("qwen3_moe", size, device, attention), device)


def gpt_oss(size: Size, device: str, attention: str) -> Workload:
    """gpt-oss-20b's shape in bf16. transformers writes its attention out where others have sdpa."""
    written = "eager" if attention == "sdpa" else attention
    return _packed(_causal_model("gpt_oss", size, device, written), device)


def padded(
    row: Callable[[Size, str, str], Workload], size: Size, device: str, attention: str, prompt: float = 0.0
) -> Workload:
    """What ``row`` trains, on batches of 8 rows, of which one is full; about 40% of the tokens are padding.

    ``prompt``: the rows are completions of one prompt, of this share of a full row, and completions alone count.
    """
    workload = row(size, device, attention)
    vocabulary: int = workload.config.vocab_size

    def batch(tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
        longest = tokens // ROWS_OF_PADDED
        least, shared = (prompt or 0.1) * longest, round(prompt * longest)
        drawn = torch.rand(ROWS_OF_PADDED, generator=generator) * (longest - least) + least
        lengths = torch.cat([torch.tensor([longest]), drawn[1:].long().clamp(min=2)])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        ids = torch.randint(vocabulary, mask.shape, generator=generator)
        ids[:, :shared] = ids[0, :shared]
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :shared] = -100
        made = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: tensor.to(device) for name, tensor in made.items()}

    return replace(workload, batch=batch)


ROWS = {
    "qwen3-bf16": Row(qwen3_bf16),
    "qwen3-autocast": Row(qwen3_autocast),
    "llama-bf16": Row(llama_bf16),
    "llama-lora": Row(llama_lora),
    "llama-8b-lora": Row(partial(large_lora, "llama_8b")),
    "qwen3-8b-lora": Row(partial(large_lora, "qwen3_8b"), tokens=16384),
    "qwen3-8b-lora-autocast": Row(partial(large_lora_autocast, "qwen3_8b"), tokens=16384),
    "qwen3-14b-lora": Row(partial(large_lora, "qwen3_14b"), tokens=32768),
    "qwen3-lora": Row(partial(large_lora, "qwen3"), tokens=2048),
    "llama-8b-qlora": Row(partial(large_qlora, "llama_8b"), tokens=2048),
    "qwen3-8b-qlora": Row(partial(large_qlora, "qwen3_8b"), tokens=2048),
    "qwen3-14b-qlora": Row(partial(large_qlora, "qwen3_14b"), tokens=2048),
    "qwen3-bf16-padded": Row(partial(padded, qwen3_bf16)),
    "qwen3-8b-lora-padded": Row(partial(padded, partial(large_lora, "qwen3_8b"))),
    "qwen3-8b-qlora-padded": Row(partial(padded, partial(large_qlora, "qwen3_8b"))),
    "qwen3-bf16-group": Row(partial(padded, qwen3_bf16, prompt=0.5), tokens=16384),
    "qwen3-8b-qlora-group": Row(partial(padded, partial(large_qlora, "qwen3_8b"), prompt=0.5), tokens=16384),
    "gemma3-1b": Row(gemma3_1b),
    "gpt-oss": Row(gpt_oss, tokens=2048, layers=4),
    "qwen3-moe": Row(qwen3_moe, layers=4),
    "qwen3-8b-bf16": Row(qwen3_8b_bf16, layers=2),
}


def sized(
    row: str, device: str, tokens: int | None = None, layers: int | None = None, least: int | None = None
) -> tuple[str, Size]:
    """Of ``NAME[@TOKENS[xLAYERS]]``: the name of a row of ``ROWS``, and its size.

    Args:
        tokens, layers: where the row names none.

    Raises:
        ValueError: what stands behind the name is no number.
    """
    name, _, behind = row.partition("@")
    own_tokens, _, own_layers = behind.partition("x")
    is_tiny = device == "cpu"
    total = int(own_tokens or tokens or (256 if is_tiny else ROWS[name].tokens))
    depth = int(own_layers) if own_layers else layers or (None if is_tiny else ROWS[name].layers)
    return name, Size(total, least or total * 6000 // 8192, depth, is_tiny)


ROWS_OF_PADDED = 8
NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
QWEN3_30B: dict[str, Any] = dict(zip(NAMES, (151936, 2048, 6144, 48, 32, 4, 128), strict=True))
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": dict(zip(NAMES, (151936, 1024, 3072, 28, 16, 8, 128), strict=True)) | {"tie_word_embeddings": True},
    "llama": dict(zip(NAMES, (128256, 2048, 8192, 16, 32, 8, 64), strict=True)) | {"tie_word_embeddings": True},
    "llama_8b": dict(zip(NAMES, (128256, 4096, 14336, 32, 32, 8, 128), strict=True)) | {"model_type": "llama"},
    "qwen3_8b": dict(zip(NAMES, (151936, 4096, 12288, 36, 32, 8, 128), strict=True)) | {"model_type": "qwen3"},
    "qwen3_30b": QWEN3_30B | {"model_type": "qwen3"},
    "qwen3_14b": dict(zip(NAMES, (151936, 5120, 17408, 40, 40, 8, 128), strict=True)) | {"model_type": "qwen3"},
    "gemma3_text": dict(zip(NAMES, (262144, 1152, 6912, 26, 4, 1, 256), strict=True)) | {"sliding_window": 512},
    "gpt_oss": dict(zip(NAMES, (201088, 2880, 2880, 24, 64, 8, 64), strict=True)) | {"num_local_experts": 32},
    "qwen3_moe": QWEN3_30B | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
}
"""By transformers' type of model, or with it."""
TINY = dict(zip(NAMES, (256, 64, 96, 2, 4, 2, 16), strict=True))
TINY_TOO: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 32, "sliding_window_pattern": 2},
    "gpt_oss": {"sliding_window": 32, "num_local_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
}


def _causal_model(family: str, size: Size, device: str, attention: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(SHAPES[family])
    if size.is_tiny:
        settings |= TINY | TINY_TOO.get(family, {})
    if size.layers:
        settings["num_hidden_layers"] = size.layers
    # Ids of special tokens that lie outside of a tiny vocabulary are refused; none is used.
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    family = settings.pop("model_type", family)
    config = AutoConfig.for_model(family, use_cache=False, max_position_embeddings=131072, **special, **settings)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()


def _quantize(model: Any) -> None:
    """Each linear layer but the head, as transformers does when it loads a model in 4 bits."""
    import bitsandbytes

    for parent in list(model.model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                made = bitsandbytes.nn.Linear4bit(
                    *(layer.in_features, layer.out_features),
                    bias=layer.bias is not None,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    device="meta",
                )
                weight = layer.weight.detach()
                made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
                made.bias = layer.bias
                setattr(parent, name, made.to(weight.device))
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True


def document_lengths(batch: dict[str, Tensor]) -> list[int]:
    """Of one row of packed documents, told apart by ``position_ids`` [1, T], or what ``attention_mask`` [B, T] shows
    of padded rows."""
    if "position_ids" not in batch:
        shown: list[int] = batch["attention_mask"].sum(1).tolist()
        return shown
    positions = batch["position_ids"].cpu()
    starts = [*(positions[0] == 0).nonzero().flatten().tolist(), positions.shape[1]]
    return [last - first for first, last in pairwise(starts)]


def packed_model(family: str, size: Size, device: str, attention: str) -> Workload:
    """A model of one of ``SHAPES`` in bf16, and packed batches for it."""
    return _packed(_causal_model(family, size, device, attention), device)


def _under_autocast(workload: Workload, device: str) -> Workload:
    return replace(workload, around=partial(torch.autocast, device, dtype=torch.bfloat16))


def _packed(model: Any, device: str) -> Workload:
    vocabulary: int = model.config.vocab_size

    def batch(tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
        positions = torch.cat([torch.arange(length) for length in random_lengths(tokens, generator)])[None]
        ids = torch.randint(vocabulary, positions.shape, generator=generator)
        made = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
        return {name: tensor.to(device) for name, tensor in made.items()}

    return Workload(model, model.model.layers, batch, model.config)
