"""Does training with glue end where training in eager mode ends? TRL's SFTTrainer on the demo's bytes, as one plot.

All runs have the same weights, batches and optimizer. Eager runs whose first weights are rounded otherwise, in the last
bit, show how far apart runs of equal standing drift: glue's run has to stay within that spread.

    python -m benchmarks.sft_curve --device cuda --steps 200 --svg docs/sft_curve.svg
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

from benchmarks.curves_svg import Curve, Panel, draw
from demo.packed_model import BEGIN, END, VOCABULARY, read_documents


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sft_curve", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="packed tokens of a step (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64 (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="eager runs rounded otherwise (default: %(default)s)")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], help="of products; weights are fp32; default: by device"
    )
    parser.add_argument("--backend", default="glue", help="default: %(default)s")
    parser.add_argument("--svg", type=Path, help="where to write the plot")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    args.precision = args.precision or ("fp32" if args.device == "cpu" else "bf16")
    eager = losses(args)
    rounded = [losses(args, seed=seed) for seed in range(1, args.seeds + 1)]
    compiled = losses(args, backend=args.backend)
    spread = (torch.stack([a - b for a, b in itertools.combinations([eager, *rounded], 2)])).abs().amax(0)
    difference = (compiled - eager).abs()
    print(f"loss: {eager[0]:.4f} to {eager[-1]:.4f} in {args.steps} steps, {args.backend} {compiled[-1]:.4f}")
    print(f"largest difference of eager runs: {spread.max():.2e}, mean {spread.mean():.2e}")
    print(f"largest of {args.backend} and eager: {difference.max():.2e}, mean {difference.mean():.2e}")
    if args.svg is not None:
        args.svg.write_text(plot(args, eager, compiled, difference, spread))
    is_within = bool(difference.max() <= spread.max())
    print("within the spread of the eager runs" if is_within else "NOT within the spread of the eager runs")
    return 0 if is_within else 1


def losses(args: argparse.Namespace, seed: int = 0, backend: str | None = None) -> torch.Tensor:
    """Of each step of one run; a ``seed`` above 0 rounds the weights it begins with otherwise."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            use_cpu=args.device == "cpu",
            bf16=args.precision == "bf16",
            packing=True,
            packing_strategy="bfd",
            max_length=args.tokens,
            per_device_train_batch_size=1,
            gradient_checkpointing=False,
            max_steps=args.steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **({"torch_compile_backend": backend} if backend is not None else {}),
        )
        trainer = SFTTrainer(
            model=rounded_otherwise(model(args), seed),
            args=config,
            train_dataset=Dataset.from_list([{"input_ids": [BEGIN, *text, END]} for text in read_documents()]),
            processing_class=tokenizer(),
        )
        trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == args.steps, f"{len(found)} losses of {args.steps} steps"
    return torch.tensor(found, dtype=torch.float64)


def model(args: argparse.Namespace) -> Any:
    heads = args.hidden // 32
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=32,
            max_position_embeddings=args.tokens,
            pad_token_id=END,
            bos_token_id=BEGIN,
            eos_token_id=END,
            use_cache=False,
        )
    )


def rounded_otherwise(model: Any, seed: int) -> Any:
    """Each weight one unit in the last place up or down, at random."""
    if seed:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                sign = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
                weight.mul_(1 + torch.finfo(weight.dtype).eps * sign)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """Its documents are tokens already: it names the last one."""
    names = {f"<{token}>": token for token in range(VOCABULARY)}
    special = {"bos_token": f"<{BEGIN}>", "eos_token": f"<{END}>", "pad_token": f"<{END}>"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(names, unk_token="<0>")), **special)


def plot(
    args: argparse.Namespace,
    eager: torch.Tensor,
    compiled: torch.Tensor,
    difference: torch.Tensor,
    spread: torch.Tensor,
) -> str:
    title = (
        f"SFTTrainer, {args.layers} layers, rows of up to {args.tokens} bytes, {args.precision} over fp32 weights, "
        f"torch {torch.__version__} on {args.device}"
    )
    loss = Panel("loss", [Curve("eager", eager.tolist()), Curve(args.backend, compiled.tolist())])
    apart = Panel(
        "difference of losses",
        [
            Curve("eager runs rounded otherwise", spread.tolist()),
            Curve(f"{args.backend} and eager", difference.tolist()),
        ],
        logarithmic=True,
    )
    return draw(title, "step", [loss, apart])


if __name__ == "__main__":
    sys.exit(main())
