"""Where the time of a first training step goes, with cold and with warm caches.

    python -m benchmarks.compile_time [--rows qwen3,llama-lora] [--variants inductor,glue,glue+share] [--layers 8]

Each row and variant runs twice, each time in a process of its own: first with empty caches of Inductor's and Triton's,
then with what the first has left there. ``glue+share`` is glue with the rewrite ``share_layers``.

Columns: seconds of the first step (forward, backward, all compiles in them); of these, seconds of Dynamo's tracing, of
glue's passes, of AOTAutograd (tracing, joint passes and partitioning, without the compiles that it starts; glue's pass
on the partitioned graphs counts here too) and of Inductor (lowering, code, kernels); then milliseconds of a later step,
the median, and the most memory of those steps.

On a CPU sizes are tiny, to test the code and to see how times grow: ``--device cpu --layers 16``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.compile_time_rows import ROWS
from benchmarks.end_to_end_rows import Size

VARIANTS: Mapping[str, dict[str, Any] | None] = {
    "inductor": None,
    "glue": {"passes": {"share_layers": False}},
    "glue+share": {"passes": {"share_layers": True}},
}
COLUMNS = ("first s", "dynamo s", "passes s", "aot s", "inductor s", "step ms", "peak GiB", "loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="qwen3")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # one measurement, in this process
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given)))
        return
    print("| row | variant | caches |", " | ".join(COLUMNS), "|")
    print("|---" * (3 + len(COLUMNS)) + "|")
    for row in given.rows.split(","):
        for variant in given.variants.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for caches in ("cold", "warm"):
                    print(f"| {row} | {variant} | {caches} |", " | ".join(_cells(given, row, variant, folder)), "|")
                    sys.stdout.flush()


def _cells(given: argparse.Namespace, row: str, variant: str, folder: str) -> list[str]:
    passed = {"rows": row, "variants": variant, "device": given.device, "steps": given.steps}
    passed |= {name: value for name in ("layers", "tokens") if (value := getattr(given, name)) is not None}
    arguments = [text for name, value in passed.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    command = [sys.executable, "-m", "benchmarks.compile_time", "--one", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return [(done.stderr.strip().splitlines() or ["failed"])[-1], *[""] * (len(COLUMNS) - 1)]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return [f"{found[column]:.2f}" for column in COLUMNS]


def measure(given: argparse.Namespace) -> dict[str, float]:
    """One row, one variant, with the caches as they are."""
    row, options = ROWS[given.rows], VARIANTS[given.variants]
    is_tiny = given.device == "cpu"
    tokens = given.tokens or (128 if is_tiny else 8192)
    torch.manual_seed(0)
    workload = row.build(Size(tokens, tokens, given.layers, is_tiny), given.device, "sdpa")
    batch = workload.batch(tokens, torch.Generator().manual_seed(0))
    if options is None:
        model = torch.compile(workload.model, backend="inductor")
    else:
        model = torch.compile(workload.model, backend="glue", options={**row.options, **options})

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        with workload.around():
            loss = model(**batch).loss
        loss.backward()
        workload.model.zero_grad()
        found = float(loss.detach())  # waits for the device
        if given.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, found

    first, _ = step()
    spent = _seconds()
    step()
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    later = [step() for _ in range(given.steps)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if given.device == "cuda" else 0.0
    times = {"first s": first, "step ms": statistics.median(seconds for seconds, _ in later) * 1000}
    return {**times, **spent, "peak GiB": peak, "loss": later[-1][1]}


def _seconds() -> dict[str, float]:
    """By what torch has counted of itself (``torch._dynamo.utils.compile_times``)."""
    from torch._dynamo.utils import compilation_time_metrics as spent

    inductor = [seconds for name, times in spent.items() if name == "compile_fx_inner" for seconds in times]
    passes = sum(sum(times) for name, times in spent.items() if name.startswith("pass.glue."))
    # The forward's compile is inside of AOTAutograd's time, the backward's is not: it waits for the first backward.
    aot = sum(spent.get("create_aot_dispatcher_function", ())) - sum(inductor[: len(inductor) // 2])
    return {
        "dynamo s": sum(spent.get("bytecode_tracing", ())),
        "passes s": passes,
        "aot s": max(aot, 0.0),
        "inductor s": sum(inductor),
    }


if __name__ == "__main__":
    main()
