"""Whole training steps, loss and AdamW included, with totals that vary against a fixed total, on one GPU.

    python -m benchmarks.end_to_end [--rows qwen3-bf16,qwen3-autocast] [--variants glue,inductor,flex,eager]
    python -m benchmarks.end_to_end --rows qwen3-bf16 --variants glue-layers,inductor-layers,flex-layers

A row is an unmodified model of transformers, random weights, one row of packed documents that differ each step. First
all totals are the same, so torch compiles for that size; then they vary, and it compiles once more, for any size. Both
are timed, in the same process. All variants of all rows compile side by side, each in its own process, and are timed
one after the other as soon as nothing compiles any more, or ``--limit`` is over; what is not ready then is left out.

The table at the end has, for each variant: milliseconds of a step with the fixed total; microseconds for a token, with
the fixed total and with totals that vary, and their ratio; graphs that were compiled, glue's warnings, memory, and the
seconds until both compiles were done. ``flex`` is Inductor with transformers' flex_attention, the others have sdpa.
``glue-torch`` takes no kernels of other packages. ``liger`` is eager, the model patched by Liger's kernels (package
``liger-kernel``), its loss without logits among them. A variant that ends in ``-layers`` compiles each decoder layer by
itself (``layer.compile(...)``), as FSDP2 recipes do; masks, rotary tables and the loss are eager then, and equal layers
share their graphs.

All that is compared is on the device at once: rows of billions of weights need a run of their own (``gpt-oss``: 26 GiB
for each variant, while it waits).

On a CPU sizes are tiny, to test the code: ``--device cpu --compiler aot_eager``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.end_to_end_rows import ROWS, Size

DEFAULT_ROWS = ("qwen3-bf16", "qwen3-autocast")
DEFAULT_VARIANTS = ("glue", "inductor", "flex", "eager")
"""In the order in which they start, those that compile fastest first."""
COLUMNS = {
    "fixed_ms": "step ms",
    "fixed_us": "fixed us/token",
    "varying_us": "varying us/token",
    "ratio": "ratio",
    "graphs": "graphs",
    "warnings": "warnings",
    "peak_gib": "GiB",
    "ready_s": "ready s",
    "loss": "last loss",
}


@dataclass(frozen=True)
class Variant:
    """What compiles a row, and what it compiles.

    Attributes:
        compiler: "glue", "inductor" or, for eager, None.
        attention: transformers' name for it.
        by_layers: each decoder layer by itself; what is around the layers stays eager.
        kernels: glue's option.
        is_patched: by Liger.
    """

    compiler: str | None
    attention: str = "sdpa"
    by_layers: bool = False
    kernels: str = "all"
    is_patched: bool = False


VARIANTS = {
    "glue": Variant("glue"),
    "inductor": Variant("inductor"),
    "flex": Variant("inductor", "flex_attention"),
    "eager": Variant(None),
    "liger": Variant(None, is_patched=True),
    "glue-torch": Variant("glue", kernels="torch"),
    "glue-layers": Variant("glue", by_layers=True),
    "inductor-layers": Variant("inductor", by_layers=True),
    "flex-layers": Variant("inductor", "flex_attention", by_layers=True),
}


# -- one variant of one row, in a process of its own


@dataclass
class Timed:
    seconds: float
    tokens: int
    loss: float


class Trainer:
    """One model, its optimizer and its batches."""

    def __init__(self, row: str, variant: str, size: Size, device: str, compiler: str) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        how = VARIANTS[variant]
        self.workload = ROWS[row].build(size, device, how.attention)
        self.call = self.workload.model
        if how.is_patched:
            _patch_by_liger(self.call)
        if how.compiler is not None:
            settings: dict[str, Any] = {"backend": compiler}
            if how.compiler == "glue":
                settings = {"backend": "glue", "options": {"compiler": compiler, "kernels": how.kernels}}
            if how.by_layers:
                for layer in self.workload.layers:
                    layer.compile(**settings)
            else:
                self.call = torch.compile(self.call, **settings)
        trained = [weight for weight in self.workload.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        self.generator = torch.Generator().manual_seed(0)

    def steps(self, number: int, varies: bool) -> Iterator[Timed]:
        """``number`` steps, one by one, each on a batch of its own."""
        for _ in range(number):
            drawn = torch.randint(self.size.least, self.size.tokens, (), generator=self.generator)
            tokens = int(drawn) if varies else self.size.tokens
            batch = self.workload.batch(tokens, self.generator)
            self.wait()
            start = time.perf_counter()
            with self.workload.around():
                loss = self.call(**batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.wait()
            yield Timed(time.perf_counter() - start, tokens, loss.item())

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _patch_by_liger(model: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model.get_base_model() if hasattr(model, "get_base_model") else model)


@dataclass(frozen=True)
class Schedule:
    """Steps to compile for the fixed total and for totals that vary, and steps to time for each."""

    compiling: int = 2
    warm_up: int = 2
    timed: int = 10
    kinds: tuple[bool, ...] = (False, True)
    """Whether totals vary, of the kinds of batches in their order."""


def measure(connection: Connection, schedule: Schedule, *which: Any) -> None:
    """Compile, say so, wait, then time the steps and send the result; of a failure its text."""
    from glue_compiler.errors import GlueWarning

    torch.set_float32_matmul_precision("high")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.perf_counter()
            trainer = Trainer(*which)
            for varies in schedule.kinds:
                list(trainer.steps(schedule.compiling, varies))
            ready = time.perf_counter() - start
            if trainer.device == "cuda":
                torch.cuda.empty_cache()  # for the others
            connection.send(f"ready after {ready:.0f} s")
            connection.recv()
            if trainer.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times = {}
            for varies in schedule.kinds:
                list(trainer.steps(schedule.warm_up, varies))
                times[varies] = list(trainer.steps(schedule.timed, varies))
        peak = torch.cuda.max_memory_allocated() / 2**30 if trainer.device == "cuda" else 0.0
        per_token = [statistics.median(t.seconds / t.tokens * 1e6 for t in times[kind]) for kind in schedule.kinds]
        fixed, varying = per_token[0], per_token[1] if len(per_token) > 1 else float("nan")
        connection.send(
            {
                "fixed_ms": statistics.median(t.seconds for t in times[False]) * 1e3,
                "fixed_us": fixed,
                "varying_us": varying,
                "ratio": varying / fixed,
                "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
                "warnings": sum(issubclass(each.category, GlueWarning) for each in caught),
                "peak_gib": peak,
                "ready_s": ready,
                "loss": times[schedule.kinds[-1]][-1].loss,
                "messages": [str(each.message) for each in caught if issubclass(each.category, GlueWarning)],
            }
        )
    except Exception as error:
        failed = f"{type(error).__name__}: {str(error)[:300]}"
        connection.send({"failed": failed, "trace": traceback.format_exc()[-1500:]})


# -- all of them


@dataclass
class Running:
    row: str
    variant: str
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    is_ready: bool = False
    result: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.row} {self.variant}"

    def receive(self, seconds: float) -> Any:
        try:
            return self.pipe.recv() if self.pipe.poll(max(0.0, seconds)) else {"failed": "not ready in time"}
        except EOFError:
            return {"failed": "the process ended"}


def run_all(rows: list[str], variants: list[str], arguments: argparse.Namespace) -> list[Running]:
    """Start everything, wait until all have compiled or the limit is over, time one after the other."""
    context = multiprocessing.get_context("spawn")
    start = time.monotonic()
    found = []
    for variant in variants:
        for row in rows:
            ours, theirs = context.Pipe()
            which = (row, variant, size_of(row, arguments), arguments.device, arguments.compiler)
            schedule = Schedule(timed=arguments.steps, kinds=(False,) if arguments.fixed else (False, True))
            process = context.Process(target=measure, args=(theirs, schedule, *which))
            process.start()
            theirs.close()
            found.append(Running(row, variant, process, ours))
    while waiting := [each for each in found if not each.is_ready and each.result is None]:
        left = start + arguments.limit - time.monotonic()
        ready = {id(pipe) for pipe in wait([each.pipe for each in waiting], max(0.0, left))}
        if not ready:
            break
        for each in waiting:
            if id(each.pipe) in ready:
                _note(each, each.receive(0), time.monotonic() - start)
    for each in found:
        if not each.is_ready:
            _end(each)
    for each in found:
        if each.is_ready:
            each.pipe.send(None)
            each.result = each.receive(arguments.limit)
            _end(each)
            print(json.dumps({"row": each.row, "variant": each.variant, **each.result}), flush=True)
    return found


def _note(each: Running, message: Any, seconds: float) -> None:
    if isinstance(message, dict):
        each.result = message
        message = message.get("trace", message["failed"])
    else:
        each.is_ready = True
    print(f"[{seconds:4.0f} s] {each.name}: {message}", flush=True)


def _end(each: Running) -> None:
    each.result = each.result or {"failed": "not ready in time"}
    each.process.terminate()
    each.process.join()


def print_table(found: list[Running]) -> None:
    print(f"\n| | | {' | '.join(COLUMNS.values())} |\n|---|---|{'---|' * len(COLUMNS)}")
    for each in sorted(found, key=lambda each: each.row):
        result = each.result or {}
        cells = [_cell(result[name]) for name in COLUMNS] if "ratio" in result else [str(result.get("failed"))]
        print(f"| {each.row} | {each.variant} | {' | '.join(cells)} |", flush=True)


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def size_of(row: str, arguments: argparse.Namespace) -> Size:
    is_tiny = arguments.device != "cuda"
    tokens = arguments.tokens or (256 if is_tiny else ROWS[row].tokens)
    return Size(tokens, arguments.least or tokens * 6000 // 8192, arguments.layers, is_tiny)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(DEFAULT_ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--variants", default=",".join(DEFAULT_VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument(
        "--tokens", type=int, help="the fixed total, which those that vary stay below; a row has its own"
    )
    parser.add_argument("--least", type=int, help="the least total of those that vary; 6000 of 8192 by default")
    parser.add_argument("--fixed", action="store_true", help="without totals that vary: one compile instead of two")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=10, help="timed, for each of the two kinds of totals")
    parser.add_argument("--limit", type=float, default=290, help="seconds for all compiles together")
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    # Totals that vary leave holes in memory that is cut into blocks of fixed sizes.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    rows = arguments.rows.split(",")
    print(
        f"torch {torch.__version__} on {device}",
        *(f"{row}: {size_of(row, arguments)}" for row in rows),
        sep="\n",
        flush=True,
    )
    found = run_all(rows, arguments.variants.split(","), arguments)
    print_table(found)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([{"row": each.row, "variant": each.variant, **(each.result or {})} for each in found], file)


if __name__ == "__main__":
    main()
