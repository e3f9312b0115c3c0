"""Trains the same small model on the same packed batches in eager mode, with Inductor and with glue, and compares.

The model is a byte-level Qwen3 with LoRA and gradient checkpointing (demo/packed_model.py); the text is this
repository's own. Losses have to agree, and fall; the tables say what glue rewrote and what each run cost.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo.packed_model import Batch, packed_batches, packed_qwen3
from demo.training import Run, train

BACKENDS = ("eager", "inductor", "glue")
CAPTURE_FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
# fp32 sums in another order: after some 30 optimizer steps the losses still agree this well.
LOSS_TOLERANCE = 1e-2


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.train_packed", description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="packed tokens of a batch (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64 (default: %(default)s)")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), metavar="NAME", help="default: all of them")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; cuda trains in bfloat16 (default: %(default)s)")
    parser.add_argument(
        "--capture-flags",
        action="store_true",
        help="let Dynamo capture .item() and nonzero for every backend, as only glue does by itself",
    )
    parser.add_argument("--dump", metavar="FOLDER", help="keep glue's graphs and summary.json there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    # transformers renames gradient_checkpointing_enable, which this model and peft still call by its old name.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    console = Console()
    batches = packed_batches(args.steps, args.tokens, device=args.device)
    console.print(describe(batches, args))
    with tempfile.TemporaryDirectory() as temporary:
        dump = args.dump or temporary
        flags = dict.fromkeys(CAPTURE_FLAGS, True) if args.capture_flags else {}
        with torch._dynamo.config.patch(flags):
            runs = run_all(batches, args, dump, console)
        console.print(runs_table(runs))
        summary = Path(dump) / "summary.json"
        if summary.is_file():
            console.print(rewrites_table(json.loads(summary.read_text())))
    return report_losses(runs, console)


def describe(batches: Sequence[Batch], args: argparse.Namespace) -> str:
    documents = [int((batch["position_ids"] == 0).sum()) for batch in batches]
    return (
        f"{args.layers}-layer Qwen3, LoRA, gradient checkpointing; {len(batches)} batches of {args.tokens} bytes in "
        f"{min(documents)} to {max(documents)} documents; torch {torch.__version__} on {args.device}"
    )


def run_all(batches: Sequence[Batch], args: argparse.Namespace, dump: str, console: Console) -> list[Run]:
    """One run per backend, from the same weights."""
    runs = []
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
        for backend in args.backends:
            dtype = torch.float32 if torch.device(args.device).type == "cpu" else torch.bfloat16
            model = packed_qwen3(args.layers, dtype=dtype, hidden=args.hidden, device=args.device)
            task = progress.add_task(backend, total=len(batches), loss="compiling" if backend != "eager" else "")
            show = functools.partial(show_step, progress, task)
            runs.append(train(model, batches, backend, {"dump": dump} if backend == "glue" else None, show))
    return runs


def show_step(progress: Progress, task: TaskID, loss: float) -> None:
    progress.update(task, advance=1, loss=f"loss {loss:.3f}")


def runs_table(runs: Sequence[Run]) -> Table:
    table = Table(title="One training step, by backend", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.backend, justify="right")
    rows = {
        "first step, compile included (s)": [f"{run.first_step_seconds:.1f}" for run in runs],
        "later steps, median (ms)": [f"{run.median_step_seconds * 1e3:.1f}" for run in runs],
        "graphs": [str(run.graphs) for run in runs],
        "graph breaks": [str(run.graph_breaks) for run in runs],
        "aten::nonzero a step": [str(run.nonzeros) for run in runs],
        "host reads a step (aten::_local_scalar_dense)": [str(run.host_reads) for run in runs],
        "first loss": [f"{run.losses[0]:.4f}" for run in runs],
        "last loss": [f"{run.losses[-1]:.4f}" for run in runs],
        f"largest loss difference to {runs[0].backend}": [f"{run.max_loss_difference(runs[0]):.1e}" for run in runs],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def rewrites_table(summary: dict[str, Any]) -> Table:
    """What glue's ``summary.json`` says about each graph and pass."""
    table = Table(title="What glue rewrote", title_justify="left")
    for name in ("graph", "nodes", "pass", "counts", "left alone", "ms"):
        table.add_column(name, justify="right" if name == "ms" else "left")
    for graph in summary["graphs"]:
        nodes = f"{graph['nodes_before']} → {graph['nodes_after']}"
        for done in graph["passes"]:
            counts = ", ".join(f"{name} {count}" for name, count in done["counts"].items()) or "nothing"
            reasons = Counter(skip["reason"] for skip in done["skips"])
            skips = "\n".join(f"{count} times: {reason}" for reason, count in reasons.items())
            table.add_row(str(graph["id"]), nodes, done["name"], counts, skips, f"{done['ms']:.0f}")
    return table


def report_losses(runs: Sequence[Run], console: Console) -> int:
    """Say whether the runs agree and learn; 0 if so, as a process's exit status."""
    first = runs[0]
    failures = []
    for run in runs:
        difference = run.max_loss_difference(first)
        if not all(map(math.isfinite, run.losses)):
            failures.append(f"{run.backend}: a loss is not finite")
        elif difference > LOSS_TOLERANCE:
            failures.append(f"{run.backend}: losses differ from {first.backend}'s by up to {difference:.1e}")
        if len(run.losses) > 1 and run.losses[-1] >= run.losses[0]:
            failures.append(f"{run.backend}: the loss did not fall")
    for failure in failures:
        console.print(failure, style="bold red")
    if not failures:
        others = ", ".join(run.backend for run in runs[1:])
        console.print(f"Losses fall, and agree with {first.backend}'s within {LOSS_TOLERANCE:g}: {others}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
