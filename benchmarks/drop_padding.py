"""Times of training steps on a padded batch: eager, Inductor, glue, and glue without padding, on a CPU.

``--prompt``: the rows are completions of one prompt, of this share of the length, whose labels are ignored.

python -m benchmarks.drop_padding
python -m benchmarks.drop_padding --padding 0.2 --rows 4 --length 256 --steps 5
python -m benchmarks.drop_padding --prompt 0.5 --padding 0.2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VARIANTS = ("eager", "inductor", "glue, padding kept", "glue, padding dropped")
SHARED = "glue, prompt shared"


def model_of(layers: int, hidden: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
    )
    return Qwen3ForCausalLM(config)


def padded_batch(rows: int, length: int, padding: float, prompt: float) -> tuple[Tensor, Tensor, Tensor]:
    """From a short row to a full one, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1024, (rows, length), generator=generator)
    lengths = torch.linspace(max(1 - 2 * padding, 0.05), 1, rows) * length
    mask = (torch.arange(length)[None] < lengths.round()[:, None]).long()
    of_prompt = round(prompt * length)
    ids[:, :of_prompt] = ids[0, :of_prompt]
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :of_prompt] = -100
    return ids, mask, labels


def step_of(variant: str, model: nn.Module) -> Callable[..., Any]:
    def loss(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss

    if variant == "eager":
        return loss
    if variant == "inductor":
        return torch.compile(loss)
    padding = "keep" if variant.endswith("kept") else "drop"
    prefix = "share" if variant == SHARED else "keep"
    return torch.compile(loss, backend="glue", options={"padding": padding, "prefix": prefix})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, default in (
        ("rows", int, 8), ("length", int, 512), ("padding", float, 0.4), ("prompt", float, 0.0),
        ("layers", int, 2), ("hidden", int, 256),
        ("steps", int, 9), ("threads", int, 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    batch = padded_batch(given.rows, given.length, given.padding, given.prompt)
    seen = batch[1].float().mean().item()
    print(f"{given.rows} rows of {given.length} tokens, {1 - seen:.0%} padding, {given.threads} threads")
    model = model_of(given.layers, given.hidden)
    times: dict[str, list[float]] = {}
    steps = {variant: step_of(variant, model) for variant in (*VARIANTS, *([SHARED] if given.prompt else []))}
    losses = {}
    for turn in range(given.steps + 2):  # the variants in turn, so that what else runs slows down all
        for variant, step in steps.items():
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            loss = step(*batch)
            loss.backward()
            if turn >= 2:
                times.setdefault(variant, []).append(time.perf_counter() - start)
            losses[variant] = loss.item()
    for variant, found in times.items():
        time_of_step = statistics.median(found)
        ratio = time_of_step / statistics.median(times["eager"])
        print(f"{variant:24} {time_of_step * 1e3:8.1f} ms  {ratio:5.2f} of eager  loss {losses[variant]:.6f}")


if __name__ == "__main__":
    main()
