"""What models of other training libraries need in benchmarks.end_to_end: a row's weights, adapters and batches.

A peer brings its own model, loss and compilation, and trains what the row trains: the same shape with the same random
weights, the same packed documents, the same optimizer. Its package is imported when it is built, and no sooner.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.end_to_end_flops import flops_of_weights
from benchmarks.end_to_end_rows import ROWS, Size, Workload, document_lengths


@dataclass(frozen=True)
class Outcome:
    """What a model of transformers returns, as far as a training step reads it."""

    loss: Tensor


@dataclass(frozen=True)
class Adapters:
    """LoRA as a row has it, the same in each decoder layer; ``targets`` are transformers' names, such as "q_proj"."""

    rank: int
    alpha: float
    targets: frozenset[str]


def imported(module: str, peer: str, how: str) -> Any:
    """A module of a peer's package.

    Raises:
        ImportError: it cannot be imported; the message says why, and ``how`` to install the package.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package for another torch fails in many ways
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        raise ImportError(f"{peer} cannot be imported ({reason}); {how}") from error


def published(peer: str, row: str, rows: Iterable[str], size: Size, device: str) -> Workload:
    """The row's own model, with its weights, and its batches.

    Raises:
        ValueError: the peer does not train this row.
    """
    if row not in rows:
        raise ValueError(f"{peer} has no row '{row}' here; it has {', '.join(rows)}")
    workload = ROWS[row].build(size, device, "sdpa")
    return replace(workload, token_flops=flops_of_weights(workload))  # those of the row, whatever the peer does


def adapters_of(workload: Workload) -> Adapters | None:
    config = getattr(workload.model, "peft_config", {}).get("default")
    if config is None:
        return None
    return Adapters(config.r, config.lora_alpha, frozenset(name.rpartition(".")[2] for name in config.target_modules))


def base_of(workload: Workload) -> Any:
    """The model of transformers, adapters or not."""
    model: Any = workload.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def checkpoint_of(workload: Workload) -> dict[str, Tensor]:
    """The weights as a published checkpoint has them: no adapters, and weights that are tied only once."""
    found = {
        name.replace(".base_layer", ""): weight
        for name, weight in base_of(workload).state_dict().items()
        if ".lora_" not in name
    }
    if workload.config.tie_word_embeddings:
        del found["lm_head.weight"]
    return found


def with_experts_apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a checkpoint, experts that transformers 5 stacks, as they are published: each by itself, gate and up apart.

    ``experts.gate_up_proj`` [experts, 2 * inner, hidden] and ``experts.down_proj`` [experts, hidden, inner].
    """
    found = {}
    for name, weight in weights.items():
        if name.endswith(".experts.gate_up_proj"):
            kinds = dict(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True))
        elif name.endswith(".experts.down_proj"):
            kinds = {"down_proj": weight}
        else:
            found[name] = weight
            continue
        experts = name.rpartition(".")[0]
        found |= {f"{experts}.{place}.{kind}.weight": each for kind in kinds for place, each in enumerate(kinds[kind])}
    return found


def with_lengths(
    batch: Callable[[int, torch.Generator], dict[str, Tensor]],
) -> Callable[[int, torch.Generator], dict[str, Tensor]]:
    """The batches, with ``lengths``: int32 [documents] on the CPU, where collators count them."""

    def made(tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
        found = batch(tokens, generator)
        lengths = document_lengths(found)
        return {**found, "lengths": torch.tensor(lengths, dtype=torch.int32)}

    return made


def targets_of(labels: Tensor) -> Tensor:
    """Labels [1, T] moved to where they are predicted; what a model of transformers does by itself."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
