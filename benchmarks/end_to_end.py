"""Whole training steps, loss and AdamW included, with totals that vary against a fixed total, on one GPU.

    python -m benchmarks.end_to_end [--rows qwen3-bf16,qwen3-autocast] [--variants glue,inductor,flex,eager]
    python -m benchmarks.end_to_end --rows qwen3-bf16 --variants glue-layers,inductor-layers,flex-layers

A row is an unmodified model of transformers, random weights, one row of packed documents that differ each step, or in
rows that end in ``-padded`` eight rows, of which 40% is padding, which no column counts as tokens, and in those that
end in ``-group`` eight completions of one prompt, which is half of a full row. First all totals are the same, so torch
compiles for that size; then they vary, and it compiles once more, for any size. Both are timed, in the same process.
All variants of all rows compile side by side, each in its own process, and are timed one after the other as soon as
nothing compiles any more, or ``--limit`` is over; what is not ready then is left out.

A step is forward, backward, clipping of the gradients and AdamW. The table at the end has, for each variant: the
median, best and worst milliseconds of a step with the fixed total, tokens per second and the share of what the card
does in one large product; microseconds for a token with totals that vary, and the ratio to that with the fixed one;
graphs that were compiled, glue's warnings, memory; seconds of the first step, caches empty, of a first step with full
ones (``--warm``, one variant after the other, those that compile), and until both compiles were done; seconds of 100
steps with the fixed total, that first one and 99 of the median; the last loss.

Variants: ``flex`` is Inductor with transformers' flex_attention, ``fa2`` and ``fa4`` with its flash_attention_2 and 4,
where those are installed; the others have sdpa. ``glue-torch`` takes no kernels of other packages, ``glue-unshared``
compiles each of equal layers, those with ``-dropped`` at their end have ``padding="drop"``, ``glue-shared`` has
``prefix="share"`` as well, in ``-recompute`` backward computes all again that is no product, ``glue-offload`` moves the
inputs of checkpointed layers. ``glue-none`` makes no rewrite, and ``glue-metadata``, ``glue-attention``,
``glue-experts`` and ``glue-loss`` make that one alone. In ``plan-B-regions`` layers keep what fits into
``memory_budget=B`` (``plan-9.6GiB-regions``). In ``glue-update`` and ``flex-update`` clipping and AdamW are compiled
too; the others have torch's fused AdamW. ``liger`` is eager, the model patched by Liger (package ``liger-kernel``), its
loss without logits among them. A variant that ends in ``-layers`` compiles each decoder layer by itself
(``layer.compile(...)``), as FSDP2 recipes do; masks, rotary tables and the loss are eager then, and equal layers share
their graphs. ``glue`` and its forms are one graph (``regions="whole"``). ``glue-regions``, and what has that in its
name, is what a user gets by default, ``flex-regions`` what can be written by hand in its place: layers with their
checkpoints inside, head and loss. ``-cudagraphs`` have ``mode="reduce-overhead"``.

Other libraries train a row with models, kernels, losses and compilation of their own, from the row's random weights, on
the row's batches: ``torchtune``, ``torchtitan`` (with flex_attention; ``torchtitan-varlen`` with torch's varlen kernel)
and ``unsloth``, where the package is installed and has the row; benchmarks/peer_*.py say with which settings. What they
do to a batch that the others do in the model, such as masks, is a part of the step.

All that is compared is on the device at once: rows of billions of weights need a run of their own (``gpt-oss``: 26 GiB
for each variant, while it waits; ``qwen3-14b-lora`` and ``qwen3-moe`` 28 to 60). What fails for want of memory while
others compile goes on in its turn, when it has the rest of the device to itself (its ``first s`` is empty then), and
what fails again is tried once more when all others are done.

On a CPU sizes are tiny, to test the code: ``--device cpu --compiler aot_eager``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.card_memory import allocator_settings
from benchmarks.end_to_end_flops import peak_flops, step_flops
from benchmarks.end_to_end_rows import ROWS, Size, document_lengths, sized
from benchmarks.end_to_end_table import COLUMNS, cell
from benchmarks.end_to_end_variants import VARIANTS, variant_of
from benchmarks.step_kernels import StepKernels, lines_of, profiled

DEFAULT_ROWS = ("qwen3-bf16", "qwen3-autocast")
PACKAGES = (
    *("triton", "transformers", "peft", "flash-attn-4", "quack-kernels"),
    *("liger-kernel", "unsloth", "torchtune", "torchtitan"),
)
DEFAULT_VARIANTS = ("glue", "inductor", "flex", "eager")
"""In the order in which they start, those that compile fastest first."""


# -- one variant of one row, in a process of its own


@dataclass
class Timed:
    seconds: float
    tokens: int
    loss: float
    flops: float


class Trainer:
    """One model, its optimizer and its batches."""

    def __init__(self, row: str, variant: str, size: Size, device: str, compiler: str) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        how = variant_of(variant)
        self.workload = how.workload(row, size, device, compiler)
        self.call = how.compiled(self.workload, compiler)
        self.trained = [weight for weight in self.workload.model.parameters() if weight.requires_grad]
        self.optimizer, self.update = how.optimizer(self.trained, compiler)
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
            self.update()
            self.optimizer.zero_grad()
            self.wait()
            seconds = time.perf_counter() - start
            lengths = document_lengths(batch)
            yield Timed(seconds, sum(lengths), loss.item(), step_flops(self.workload, lengths))

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Schedule:
    """Steps to compile for the fixed total and for totals that vary, and steps to time for each."""

    compiling: int = 2
    warm_up: int = 4  # by then layers keep what fits
    timed: int = 10
    kinds: tuple[bool, ...] = (False, True)
    """Whether totals vary, of the kinds of batches in their order."""
    profiled: int = 0  # behind the timed ones


def measure(connection: Connection, schedule: Schedule, caches: str, *which: Any) -> None:
    """Compile, say so, wait, then time the steps and send the result; of a failure its text."""
    from glue_compiler.errors import GlueWarning

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
    torch.set_float32_matmul_precision("high")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.perf_counter()
            trainer = Trainer(*which)
            first = prepare(trainer, schedule)
            ready = time.perf_counter() - start
            if trainer.device == "cuda":
                torch.cuda.empty_cache()  # for the others
            connection.send({"first_s": first, "ready_s": ready})
            connection.recv()
            if first is None:  # the others hold less now
                prepare(trainer, schedule)
            times, peak = {}, 0.0
            for varies in schedule.kinds:
                list(trainer.steps(schedule.warm_up, varies))
                if trainer.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                times[varies] = list(trainer.steps(schedule.timed, varies))
                if trainer.device == "cuda":
                    peak = max(peak, torch.cuda.max_memory_allocated() / 2**30)
        of_glue = [each for each in caught if issubclass(each.category, GlueWarning)]
        connection.send(
            {
                **numbers_of(times[False], times.get(True, [])),
                "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
                "warnings": len(of_glue),
                "peak_gib": peak,
                "messages": [str(each.message) for each in of_glue],
                **({"kernels": kernels} if (kernels := _kernels(trainer, schedule.profiled)) else {}),
            }
        )
    except Exception as error:
        failed = f"{type(error).__name__}: {str(error)[:300]}"
        connection.send(
            {"failed": failed, "trace": traceback.format_exc()[-1500:], "lacks_memory": lacks_memory(error)}
        )


def _kernels(trainer: Trainer, steps: int) -> StepKernels | None:
    if trainer.device != "cuda" or not steps:
        return None
    return profiled(lambda: list(trainer.steps(steps, False)), steps)


def prepare(trainer: Trainer, schedule: Schedule) -> float | None:
    """Compile all that is timed; seconds of the first step, or None where the device's memory was not enough.

    What was compiled until then is kept, so that to prepare once more is faster.
    """
    try:
        first = next(trainer.steps(1, False)).seconds
        list(trainer.steps(schedule.compiling - 1, False))
        for varies in schedule.kinds[1:]:
            list(trainer.steps(schedule.compiling, varies))
    except Exception as error:
        if not lacks_memory(error):
            raise
        first = None
    if first is None:  # behind the handler: the error holds on to the step's tensors
        trainer.optimizer.zero_grad()
        trainer.optimizer.state.clear()  # a step that fails leaves some states half made
        gc.collect()
    return first


def lacks_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)  # cuBLAS has its own


def measure_first(connection: Connection, caches: str, *which: Any) -> None:
    """Seconds of a first step that finds the caches filled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
    torch.set_float32_matmul_precision("high")
    connection.send(next(Trainer(*which).steps(1, False)).seconds)


def numbers_of(fixed: list[Timed], varying: list[Timed]) -> dict[str, float]:
    """Of steps with the fixed total, and of those with totals that vary, if there were some."""
    seconds = statistics.median(step.seconds for step in fixed)
    of_token = statistics.median(step.seconds / step.tokens for step in fixed)
    of_token_varying = statistics.median(step.seconds / step.tokens for step in varying) if varying else float("nan")
    return {
        "fixed_ms": seconds * 1e3,
        "best_ms": min(step.seconds for step in fixed) * 1e3,
        "worst_ms": max(step.seconds for step in fixed) * 1e3,
        "tokens_s": 1 / of_token,
        "flops_s": statistics.median(step.flops / step.seconds for step in fixed),
        "varying_us": of_token_varying * 1e6,
        "ratio": of_token_varying / of_token,
        "loss": (varying or fixed)[-1].loss,
    }


# -- all of them


@dataclass
class Running:
    row: str
    variant: str
    which: tuple[Any, ...]
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    is_ready: bool = False
    result: dict[str, Any] | None = None
    kernels: StepKernels | None = None

    @property
    def name(self) -> str:
        return f"{self.row} {self.variant}"

    def receive(self, seconds: float) -> Any:
        try:
            return self.pipe.recv() if self.pipe.poll(max(0.0, seconds)) else {"failed": "not ready in time"}
        except EOFError:
            return {"failed": "the process ended"}


def run_all(cases: list[tuple[str, str]], arguments: argparse.Namespace, caches: str) -> list[Running]:
    """Start everything, wait until all have compiled or the limit is over, time one after the other.

    What has failed for want of memory while others held theirs is started once more then, by itself.
    """
    kinds = (False,) if arguments.fixed else (False, True)
    profiled_steps = 2 if arguments.kernels else 0
    schedule = Schedule(warm_up=arguments.warm_up, kinds=kinds, timed=arguments.steps, profiled=profiled_steps)

    def started(row: str, variant: str) -> Running:
        name, size = row.partition("@")[0], size_of(row, arguments)
        which = (name, variant, size, arguments.device, arguments.compiler)
        return Running(row, variant, which, *started_process(measure, schedule, f"{caches}/{row}-{variant}", *which))

    found = [started(row, variant) for row, variant in cases]
    time_all(found, arguments.limit)
    for place, each in enumerate(found):
        if len(found) > 1 and (each.result or {}).get("lacks_memory"):
            found[place] = started(each.row, each.variant)
            time_all([found[place]], arguments.limit)
    if arguments.warm:
        for each in found:
            if "failed" not in (each.result or {}) and variant_of(each.variant).is_compiled:
                _measure_warm(each, caches, arguments.limit)
    for each in found:
        each.result = {**(each.result or {}), **hundred_steps(each.result or {})}
    return found


def hundred_steps(result: dict[str, Any]) -> dict[str, float]:
    """Seconds that a run of 100 steps with the fixed total takes: the first one, caches empty and full, and 99 more."""
    kinds = {"hundredth_s": result.get("first_s"), "hundredth_warm_s": result.get("warm_s")}
    if "fixed_ms" not in result:
        return {}
    return {name: first + 99 * result["fixed_ms"] / 1e3 for name, first in kinds.items() if first is not None}


def time_all(found: list[Running], limit: float) -> None:
    """Wait until these have compiled, or for ``limit`` seconds; then time one after the other."""
    start = time.monotonic()
    while waiting := [each for each in found if not each.is_ready and each.result is None]:
        left = start + limit - time.monotonic()
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
            each.result = {**(each.result or {}), **each.receive(limit)}
            each.kernels = each.result.pop("kernels", None)
            _end(each)
            print(json.dumps({"row": each.row, "variant": each.variant, **each.result}), flush=True)


def started_process(function: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """A process that runs ``function(connection, *arguments)``, and the other end of the connection."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *arguments))
    process.start()
    theirs.close()
    return process, ours


def _measure_warm(each: Running, caches: str, limit: float) -> None:
    """With the device to itself."""
    process, pipe = started_process(measure_first, f"{caches}/{each.row}-{each.variant}", *each.which)
    with contextlib.suppress(EOFError):
        if each.result is not None and pipe.poll(limit):
            each.result["warm_s"] = pipe.recv()
    process.terminate()
    process.join()


def _note(each: Running, message: Any, seconds: float) -> None:
    each.result = message
    each.is_ready = "failed" not in message
    text = f"ready after {message['ready_s']:.0f} s" if each.is_ready else message.get("trace", message["failed"])
    print(f"[{seconds:4.0f} s] {each.name}: {text}", flush=True)


def _end(each: Running) -> None:
    each.result = each.result or {"failed": "not ready in time"}
    each.process.terminate()
    each.process.join()


def print_table(found: list[Running]) -> None:
    print(f"\n| | | {' | '.join(COLUMNS.values())} |\n|---|---|{'---|' * len(COLUMNS)}")
    for each in sorted(found, key=lambda each: each.row):
        result = each.result or {}
        cells = [cell(result.get(name)) for name in COLUMNS] if "ratio" in result else [str(result.get("failed"))]
        print(f"| {each.row} | {each.variant} | {' | '.join(cells)} |", flush=True)


def installed_packages() -> Iterator[tuple[str, str]]:
    """Those beside torch that a step may run on, and their versions."""
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def size_of(row: str, arguments: argparse.Namespace) -> Size:
    return sized(row, arguments.device, arguments.tokens, arguments.layers, arguments.least)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(DEFAULT_ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--variants", default=",".join(DEFAULT_VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument(
        "--cases",
        help="such as qwen3-bf16:glue,llama-lora@4096x8:flex (tokens, layers), instead of each variant of each row",
    )
    parser.add_argument(
        "--tokens", type=int, help="the fixed total, which those that vary stay below; a row has its own"
    )
    parser.add_argument("--least", type=int, help="the least total of those that vary; 6000 of 8192 by default")
    parser.add_argument("--fixed", action="store_true", help="without totals that vary: one compile instead of two")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--warm", action="store_true", help="then a first step of each with its caches filled")
    parser.add_argument("--kernels", type=int, default=0, help="so many of a step's longest kernels, with their times")
    parser.add_argument("--steps", type=int, default=10, help="timed, for each of the two kinds of totals")
    parser.add_argument("--warm-up", type=int, default=Schedule.warm_up, help="steps in front of these")
    parser.add_argument("--limit", type=float, default=290, help="seconds for all compiles together")
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--card", metavar="BYTES", help="each process has so much of the card alone, such as 24GiB")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    # Totals that vary leave holes in memory that is cut into blocks of fixed sizes.
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = allocator_settings(arguments.card)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    cases = [(row, variant) for variant in arguments.variants.split(",") for row in arguments.rows.split(",")]
    if arguments.cases:
        cases = [(row, variant) for row, _, variant in (each.partition(":") for each in arguments.cases.split(","))]
    for row, variant in cases:
        variant_of(variant)
        if row.partition("@")[0] not in ROWS:
            parser.error(f"there is no row '{row}'; see --help")
    print(
        f"torch {torch.__version__} on {device}",
        *(f"{row}: {size_of(row, arguments)}" for row in dict.fromkeys(row for row, _ in cases)),
        sep="\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as caches:
        found = run_all(cases, arguments, caches)
    if arguments.device == "cuda":
        peak = peak_flops(arguments.device)
        print(f"peak of a product: {peak / 1e12:.0f} TFLOP/s")
        for each in found:
            if each.result and "flops_s" in each.result:
                each.result["of_peak"] = each.result["flops_s"] / peak
    for each in found:
        if each.kernels is not None:
            print(f"\n{each.name}:", *lines_of(each.kernels, arguments.kernels), sep="\n", flush=True)
    print_table(found)
    if arguments.json:
        results = [{"row": each.row, "variant": each.variant, **(each.result or {})} for each in found]
        made = {"date": time.strftime("%Y-%m-%d"), "device": device, "torch": torch.__version__.partition("+")[0]}
        made["packages"] = dict(installed_packages())
        command = shlex.join(["python", "-m", "benchmarks.end_to_end", *sys.argv[1:]])
        with open(arguments.json, "w") as file:
            json.dump({**made, "command": command, "results": results}, file)


if __name__ == "__main__":
    main()
