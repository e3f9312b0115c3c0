"""Checkpoint offload on a decoder of Qwen3's shape: step time, peak memory and pinning cost, one row per way to do it.

    python -m benchmarks.checkpoint_offload                          # Qwen3-8B's width, 16 layers, 2 x 8192 tokens
    python -m benchmarks.checkpoint_offload --shape 14b --layers 20 --rows none,glue
    python -m benchmarks.checkpoint_offload --longest --budget 24GiB # the longest sequence that trains in so much
    python -m benchmarks.checkpoint_offload --longest --budget 24GiB --rows layers-none,layers-glue --layers 36
    python -m benchmarks.checkpoint_offload --numerics --repeats 50  # errors against fp64, and a search for races
    python -m benchmarks.checkpoint_offload --model qwen3 --layers 8 # transformers' own, with LoRA by peft

Rows, one graph: ``none`` (no offload), ``no-reorder`` (the same with Inductor's ``reorder_for_peak_memory`` off, which
glue sets too), ``serial`` (torch's own offload: a copy is waited for at once), ``glue`` (``offload="checkpoints"``),
``glue-none`` (glue, without offload). Layers compiled one by one:
``layers-none``, ``save_on_cpu`` (torch's hooks), ``trl`` (TRL's stream hooks, where it is installed), ``layers-glue``
(``glue_compiler.offload_checkpoints()``). Transformers' own ``offload=True`` (``--model``): ``own`` (Inductor),
``regions-own`` (glue, beside ``regions-none``, which has none). A row may be given twice, to see how much two differ.

Weights are random and frozen; LoRA adapters of rank 16 on the query and value projections train. "saved" is the fall
of the peak against the same model without offload, "of moved" its share of the bytes moved less two inputs, "waited" a
step of the same graph whose every copy is over before the program goes on, "pinning" the time spent on page-locked
memory in the first step, "host" the page-locked memory that glue's pool and torch's allocator hold after the last one.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from benchmarks import checkpoint_length, checkpoint_numerics
from benchmarks.checkpoint_decoder import Shape, add_shape_arguments, shape_of
from benchmarks.checkpoint_rows import (
    GRAPH_ROWS,
    LAYER_ROWS,
    REGION_ROWS,
    ROWS,
    batch_for,
    clean_up,
    model_of,
    prepare,
    serial_offload,
    stepper,
)
from benchmarks.checkpoint_transformers import FAMILIES

GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step, median and fastest and with every copy waited for; seconds of the first; bytes."""

    median: float
    fastest: float
    waited: float | None
    first_seconds: float
    peak: int
    moved: int
    pinning: float
    host: int


def measure(row: str, shape: Shape, steps: int, device: torch.device, model_name: str = "decoder") -> Measured:
    from glue_compiler.ops.copy_engine import engine

    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    model, batch = model_of(model_name, shape, device), batch_for(model_name, shape, device)
    step = stepper(*prepare(row, model), model, batch)
    with serial_offload(shape) if row == "serial" else nullcontext():
        first = step()
        pinning = engine.pool.pinning_seconds
        step()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = [step() for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    waited = None
    if row in ("glue", "layers-glue"):
        with engine.synchronised():
            waited = statistics.median(step() for _ in range(3))
    return Measured(
        median=statistics.median(times),
        fastest=min(times),
        waited=waited,
        first_seconds=first / 1000,
        peak=peak,
        moved=engine.pool.held_bytes(),
        pinning=pinning * 1000,
        host=engine.pool.pinned_bytes() + int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
        if on_gpu
        else 0,
    )


def print_rows(rows: list[str], shape: Shape, steps: int, device: torch.device, model_name: str) -> None:
    heads = (
        "step ms",
        "fastest",
        "x none",
        "waited",
        "peak GiB",
        "saved",
        "of moved",
        "moved",
        "host GiB",
        "pinning ms",
        "1st s",
    )
    print(f"{'row':<12} " + " ".join(f"{head:>10}" for head in heads))
    without: dict[tuple[str, ...], Measured] = {}
    for row in rows:
        try:
            got = measure(row, shape, steps, device, model_name)
        except ImportError as missing:
            print(f"{row:<12} skipped: {missing}")
        except Exception as error:  # one way that fails must not hide the others
            print(f"{row:<12} failed: {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}")
        else:
            group = next((group for group in (LAYER_ROWS, REGION_ROWS) if row in group), GRAPH_ROWS)
            if row in ("none", "layers-none", "regions-none"):
                without.setdefault(group, got)
            base = without.get(group)
            possible = got.moved - 2 * shape.input_bytes
            saved = base.peak - got.peak if base else 0
            cells = (
                f"{got.median:.1f}",
                f"{got.fastest:.1f}",
                f"{got.median / base.median:.3f}" if base else "",
                f"{got.waited:.1f}" if got.waited else "",
                f"{got.peak / GIB:.3f}",
                f"{saved / GIB:.2f}" if base and base is not got else "",
                f"{saved / possible:.0%}" if base and possible > 0 else "",
                f"{got.moved / GIB:.2f}",
                f"{got.host / GIB:.2f}",
                f"{got.pinning:.0f}",
                f"{got.first_seconds:.1f}",
            )
            print(f"{row:<12} " + " ".join(f"{cell:>10}" for cell in cells), flush=True)
        clean_up(device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--model", choices=("decoder", *FAMILIES), default="decoder")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rows", help=f"of {', '.join(ROWS)}; with --longest, none and glue if nothing is said")
    parser.add_argument("--budget", help="the device memory of --longest, such as 24GiB")
    parser.add_argument("--longest", action="store_true", help="the longest sequence that trains")
    parser.add_argument("--numerics", action="store_true", help="errors against fp64, and repeats of one step")
    parser.add_argument("--repeats", type=int, default=50)
    given = parser.parse_args(arguments)
    every = ("none", "glue") if given.longest else (*GRAPH_ROWS, *LAYER_ROWS)
    shape, rows = shape_of(given), given.rows.split(",") if given.rows else list(every)
    if unknown := set(rows) - set(ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    if given.model != "decoder" and given.numerics:
        parser.error("--numerics is for the decoder")
    if given.budget is None and given.longest:
        parser.error("--longest needs --budget")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {shape}")
    if given.longest:
        checkpoint_length.print_longest(rows, shape, given.budget, device, given.model)
    elif given.numerics:
        checkpoint_numerics.print_numerics(shape, given.repeats, device)
    else:
        print(f"layer inputs: {shape.layers} x {shape.input_bytes / 2**20:.0f} MiB\n")
        print_rows(rows, shape, given.steps, device, given.model)


if __name__ == "__main__":
    main()
