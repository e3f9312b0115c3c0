"""The memory that a training step needs at its peak, with and without tiles of rows.

    python -m benchmarks.tile_rows [--model qwen3] [--shape 8b] [--layers 3] [--tokens 2048] [--rows glue,glue-tiled]

Rows are those of ``benchmarks.checkpoint_offload``: a model with its own checkpoints and LoRA, without an optimiser.
Bytes are those that a step allocates beyond what was there before it, on a CPU as torch's profiler sees them, for any
size of the model: ``--hidden 512 --intermediate 1536 --heads 4 --kv-heads 1`` is an eighth of Qwen3-8B's width.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.checkpoint_decoder import add_shape_arguments, shape_of
from benchmarks.checkpoint_rows import ROWS, batch_for, clean_up, model_of, prepare, stepper
from benchmarks.checkpoint_transformers import FAMILIES

STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser, tokens=2048)
    parser.set_defaults(batch=1)
    parser.add_argument("--model", choices=("decoder", *FAMILIES), default="qwen3")
    parser.add_argument("--rows", default="glue,glue-tiled", help=f"of {', '.join(ROWS)}")
    arguments = parser.parse_args()
    rows = arguments.rows.split(",")
    if unknown := set(rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = shape_of(arguments)
    print(
        f"{arguments.model}, {shape.layers} layers of {shape.hidden}, {shape.batch} x {shape.tokens} tokens, {device}"
    )
    for row in rows:
        model = model_of(arguments.model, shape, device)
        call, context = prepare(row, model)
        step = stepper(call, context, model, batch_for(arguments.model, shape, device))
        step()
        milliseconds = statistics.median(step() for _ in range(STEPS))
        peak = _most_allocated(step, device)
        tokens = shape.batch * shape.tokens
        print(
            f"{row:<12} peak {peak / 2**20:9.1f} MiB, {peak / tokens / 1024:7.2f} KiB a token, {milliseconds:8.1f} ms"
        )
        del model, call, step
        clean_up(device)


def _most_allocated(step: Callable[[], object], device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    total = most = 0
    events = (event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


if __name__ == "__main__":
    main()
