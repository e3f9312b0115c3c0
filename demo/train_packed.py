"""Trains the same small model on the same packed batches in eager mode, with Inductor and with glue, and compares.

The model is a small Qwen3 with as large a vocabulary as real ones have for their size, and answers alone are learned:
the first three quarters of each document are its prompt. The text is the bytes of this repository. Losses have to
agree, and fall; the tables say what each run cost, and what glue rewrote.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.curves_svg import Curve, Panel, draw
from demo.packed_model import Batch, packed_batches, packed_qwen3
from demo.training import Run, train

BACKENDS = ("eager", "inductor", "glue")
CAPTURE_FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
# fp32 sums in another order: after some 30 optimizer steps the losses still agree this well.
LOSS_TOLERANCE = 1e-2
ON_A_GPU = (
    "No GPU here. On one, glue also drops attention masks, computes the loss in chunks and hides copies to the host: "
    "docs/end_to_end.svg shows what that is worth, and --device cuda runs this demo there."
)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.train_packed", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="packed tokens of a batch (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers (default: %(default)s)")
    parser.add_argument(
        "--experts", type=int, default=0, help="of each layer, in a loop; 0: none (default: %(default)s)"
    )
    parser.add_argument("--vocabulary", type=int, default=32768, help="rows of the output layer (default: %(default)s)")
    parser.add_argument(
        "--prompt",
        type=float,
        default=0.75,
        help="share of a document that is no part of the loss (default: %(default)s)",
    )
    parser.add_argument("--lora", action="store_true", help="train adapters on a frozen base (needs peft)")
    parser.add_argument("--checkpointing", action="store_true", help="compute each layer again in backward")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64 (default: %(default)s)")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), metavar="NAME", help="default: all of them")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; cuda trains in bfloat16 (default: %(default)s)")
    parser.add_argument(
        "--capture-flags",
        action="store_true",
        help="let Dynamo capture .item() and nonzero for every backend, as only glue does by itself",
    )
    parser.add_argument("--dump", metavar="FOLDER", help="keep glue's graphs and summary.json there")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the seconds since the start of each run, by step")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    # transformers renames gradient_checkpointing_enable, which this model and peft still call by its old name.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch._logging.set_logs(dynamo=logging.ERROR)  # Inductor's graph breaks are in the table
    console = Console()
    batches = packed_batches(args.steps, args.tokens, device=args.device, prompt=args.prompt)
    console.print(describe(batches, args))
    with tempfile.TemporaryDirectory() as temporary:
        dump = args.dump or temporary
        flags = dict.fromkeys(CAPTURE_FLAGS, True) if args.capture_flags else {}
        with torch._dynamo.config.patch(flags):
            runs = run_all(batches, args, dump, console)
        console.print(runs_table(runs))
        console.print(worth(runs), highlight=False)
        summary = Path(dump) / "summary.json"
        if summary.is_file():
            console.print(rewrites_text(json.loads(summary.read_text())), markup=False, highlight=False)
    if args.plot:
        Path(args.plot).write_text(plot(runs))
        console.print(f"Plot: {args.plot}")
    if not torch.cuda.is_available():
        console.print(ON_A_GPU)
    return report_losses(runs, console)


def describe(batches: Sequence[Batch], args: argparse.Namespace) -> str:
    documents = [int((batch["position_ids"] == 0).sum()) for batch in batches]
    kind = f"{args.layers}-layer Qwen3, vocabulary of {args.vocabulary}"
    kind += f", {args.experts} experts a layer, in a loop" if args.experts else ""
    kind += (", LoRA" if args.lora else "") + (", gradient checkpointing" if args.checkpointing else "")
    labels = sum(int((batch["labels"] >= 0).sum()) for batch in batches) / (len(batches) * args.tokens)
    return (
        f"{kind}; {len(batches)} batches of {args.tokens} bytes in {min(documents)} to {max(documents)} documents, "
        f"{labels:.0%} of them in the loss; torch {torch.__version__} on {args.device}"
    )


def run_all(batches: Sequence[Batch], args: argparse.Namespace, dump: str, console: Console) -> list[Run]:
    """One run per backend, from the same weights."""
    runs = []
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
        for backend in args.backends:
            dtype = torch.float32 if torch.device(args.device).type == "cpu" else torch.bfloat16
            kind = (args.layers, args.checkpointing, args.lora, dtype, 0, args.hidden, args.device)
            model = packed_qwen3(*kind, experts=args.experts, vocabulary=args.vocabulary)
            task = progress.add_task(backend, total=len(batches), loss="compiling" if backend != "eager" else "")
            show = functools.partial(show_step, progress, task)
            runs.append(train(model, batches, backend, {"dump": dump} if backend == "glue" else None, show))
    return runs


def show_step(progress: Progress, task: TaskID, loss: float) -> None:
    progress.update(task, advance=1, loss=f"loss {loss:.3f}")


def runs_table(runs: Sequence[Run]) -> Table:
    table = Table(title="Training, by backend", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.backend, justify="right")
    rows = {
        "first step, with its compile (s)": [f"{run.first_step_seconds:.1f}" for run in runs],
        "later steps, median (ms)": [f"{run.median_step_seconds * 1e3:.0f}" for run in runs],
        "until step 100, at this rate (s)": [f"{run.seconds_until(100):.0f}" for run in runs],
        "graphs": [str(run.graphs) for run in runs],
        "graph breaks": [str(run.graph_breaks) for run in runs],
        "nonzero calls in a step": [str(run.nonzeros) for run in runs],
        "values read back in a step": [str(run.host_reads) for run in runs],
        "first and last loss": [f"{run.losses[0]:.3f} {run.losses[-1]:.3f}" for run in runs],
        f"largest difference to {runs[0].backend}": [f"{run.max_loss_difference(runs[0]):.0e}" for run in runs],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def worth(runs: Sequence[Run]) -> str:
    """The times of the last run, glue's, as shares of those of each other."""
    last = runs[-1]
    shares = [
        f"{last.median_step_seconds / run.median_step_seconds:.2f} of {run.backend}'s later steps"
        + ("" if run.backend == "eager" else f", {last.first_step_seconds / run.first_step_seconds:.2f} of its first")
        for run in runs[:-1]
    ]
    return f"{last.backend} takes {'; '.join(shares)}." if shares else ""


def rewrites_text(summary: dict[str, Any]) -> str:
    """What glue's ``summary.json`` says about each graph and pass; lines wrap, whatever the terminal's width."""
    lines = []
    for graph in summary["graphs"]:
        lines.append(
            f"What glue did to graph {graph['id']} ({graph['nodes_before']} → {graph['nodes_after']} operators):"
        )
        for done in graph["passes"]:
            counts = ", ".join(f"{name} {count}" for name, count in done["counts"].items() if count) or "nothing"
            lines.append(f"  {done['name']}: {counts} ({done['ms'] / 1e3:.1f} s)")
            reasons = Counter(skip["reason"] for skip in done["skips"])
            lines += [f"    left alone x{count}: {reason}" for reason, count in reasons.items()]
    return "\n".join(lines)


def plot(runs: Sequence[Run]) -> str:
    curves = [Curve(run.backend, list(accumulate(run.step_seconds))) for run in runs]
    return draw("Seconds since the start, compile included", "step", [Panel("seconds", curves, least=0.0)])


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
