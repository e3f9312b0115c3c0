"""Whole training steps on the GPUs of one host, with torch's engines, beside the same on one of them.

    python -m benchmarks.several_gpus [--cases qwen3-bf16:ddp:glue,qwen3-8b-lora@8192x12:fsdp:glue-regions]
    python -m benchmarks.several_gpus --cases qwen3-bf16:ddp:glue --processes 2 --varying --steps 1000

Rows, sizes and variants are those of ``benchmarks.end_to_end``: an unmodified model, loss and AdamW included, one row
of packed documents that differ each step and process. ``@8192x12`` behind a row's name: 8,192 tokens a process, and 12
layers.

Engines: ``fsdp`` shards each decoder layer and what is around them, ``ddp`` has what is wrapped compiled in one graph,
``ddp-cut`` is torch's default, which cuts the graph for each bucket (it takes no checkpoints), ``tensor`` shares heads,
the MLP's columns and the head's rows among processes that have one batch.

All cases compile side by side, each in processes of its own, and are timed one after the other. The table has the
median and best milliseconds of a step of the slowest process and its peak memory, the seconds until two steps were
done, how much of one process's speed each of several has, and under DDP whether all end with the same weights.

``--varying`` draws the total of tokens anew for each step and process. ``--exhaust``: the last process asks for more
memory than there is, and the line says what ended all of them after how many seconds. ``--timeline FILE`` draws a step
of each case of several processes.

On a CPU sizes are tiny, to test the code: ``--device cpu --compiler aot_eager --processes 1,2``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end_rows import ROWS
from benchmarks.end_to_end_variants import variant_of
from benchmarks.several_gpus_ranks import ENGINES, Case, measure
from benchmarks.step_streams import panel
from benchmarks.timeline_svg import draw

CASES = (
    *("qwen3-bf16:fsdp:glue-regions", "qwen3-bf16:fsdp:flex-layers", "qwen3-bf16:ddp:glue"),
    *("qwen3-8b-lora@8192x12:fsdp:glue-regions", "qwen3-8b-lora@8192x12:fsdp:flex-layers"),
)
COLUMNS = ("step ms", "best ms", "GiB", "ready s", "scaling", "equal weights")


@dataclass
class Running:
    """A case's processes, and the folder where they leave what they find."""

    case: Case
    arguments: argparse.Namespace
    folder: Path
    started: float = field(default_factory=time.monotonic)
    failed: str | None = None

    def __post_init__(self) -> None:
        which = (str(self.folder), self.case, self.arguments)
        # Each process is joined below, so that one that fails ends the others.
        self.processes = torch.multiprocessing.start_processes(
            measure, which, nprocs=self.case.processes, join=False, start_method="spawn"
        )

    @property
    def is_ready(self) -> bool:
        return len(list(self.folder.glob("ready*"))) == self.case.processes

    def ended(self, seconds: float) -> bool:
        """Have all processes ended, or one failed, within so many seconds?"""
        limit = time.monotonic() + seconds
        try:
            while not self.processes.join(timeout=min(1.0, max(0.0, limit - time.monotonic()))):
                if time.monotonic() >= limit:
                    return False
        except Exception as error:  # of one process; the others were ended
            lines = [line for line in str(error).splitlines() if line and not line.startswith(" ")]
            self.failed = f"{lines[-1][:300]} (after {time.monotonic() - self.started:.0f} s)"
        return True

    def end(self, reason: str) -> None:
        self.failed = reason
        for process in self.processes.processes:
            process.kill()

    def found(self) -> dict[str, Any]:
        """The figures of one line; ``failed`` says why there are none."""
        if self.failed is not None:
            return {"failed": self.failed}
        found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*"))]
        worst = {name: max(each[name] for each in found) for name in ("ms", "best_ms", "peak_gib", "ready_s")}
        sums = [each["sums"] for each in found]
        is_compared = self.case.engine.startswith("ddp") and self.case.processes > 1
        are_equal = all(each == sums[0] for each in sums) if is_compared else None
        return {**worst, "equal": are_equal}


def run_all(cases: Sequence[Case], arguments: argparse.Namespace, folder: Path) -> list[Running]:
    """Start everything, wait until all have compiled or the limit is over, and time one case after the other."""
    running = []
    for number, case in enumerate(cases):
        place = folder / str(number)
        place.mkdir()
        running.append(Running(case, arguments, place))
    limit = time.monotonic() + arguments.limit
    for each in running:
        while not each.is_ready and not each.ended(0.2):
            if time.monotonic() >= limit:
                each.end("not ready in time")
                break
    for each in running:
        if each.failed is None:
            each.started = time.monotonic()
            (each.folder / "go").touch()
            if not each.ended(arguments.limit):
                each.end("not done in time")
    return running


def line(case: Case, found: dict[str, Any], alone: dict[str, Any] | None) -> str:
    if "failed" in found:
        cells = [found["failed"]]
    else:
        scaling = f"{alone['ms'] / found['ms']:.3f}" if alone is not None and "ms" in alone else ""
        equal = {None: "", True: "yes", False: "NO"}[found["equal"]]
        times = (f"{found['ms']:.1f}", f"{found['best_ms']:.1f}")
        cells = [*times, f"{found['peak_gib']:.1f}", f"{found['ready_s']:.0f}", scaling, equal]
    return f"| {' | '.join([case.row, case.engine, case.variant, str(case.processes), *cells])} |"


def cases_of(text: str, processes: Sequence[int]) -> list[Case]:
    """Raises ValueError: a name is unknown."""
    found = []
    for each in text.split(","):
        row, engine, variant = each.split(":") if each.count(":") == 2 else (each, "", "")
        for number in processes:
            case = Case(row, engine, variant, number)
            for given, known in ((engine, ENGINES), (row.partition("@")[0], ROWS)):
                if given not in known:
                    raise ValueError(f"'{each}': there is no '{given}'; known are {', '.join(known)}")
            variant_of(variant)
            found.append(case)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    cards = torch.cuda.device_count()
    numbers = ",".join(dict.fromkeys(("1", str(max(1, cards)))))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"ROW:ENGINE:VARIANT, engines of {', '.join(ENGINES)}")
    parser.add_argument("--processes", default=numbers, help="one line for each; by default one, and all cards")
    parser.add_argument("--varying", action="store_true", help="totals differ in each step and process")
    parser.add_argument("--exhaust", action="store_true", help="one process runs out of memory")
    parser.add_argument("--timeline", help="an SVG of a step of each case")
    parser.add_argument("--steps", type=int, default=10, help="timed, after some others")
    parser.add_argument("--limit", type=float, default=600, help="seconds to compile, and to run, at most")
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--device", default="cuda" if cards else "cpu", choices=("cuda", "cpu"))
    arguments = parser.parse_args(argv)
    try:
        cases = cases_of(arguments.cases, [int(number) for number in arguments.processes.split(",")])
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink is not to be had in every virtual machine
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with tempfile.TemporaryDirectory() as folder:
        running = run_all(cases, arguments, Path(folder))
        print(f"| row | engine | variant | processes | {' | '.join(COLUMNS)} |\n|{'---|' * (4 + len(COLUMNS))}")
        alone: dict[tuple[str, str, str], dict[str, Any]] = {}
        panels = []
        for each in running:
            case, found = each.case, each.found()
            which = (case.row, case.engine, case.variant)
            print(line(case, found, alone.get(which)), flush=True)
            if case.processes == 1:
                alone[which] = found
            if (each.folder / "trace.json").exists() and case.processes > 1:
                panels.append(panel(" ".join(which), each.folder / "trace.json"))
        if arguments.timeline and panels:
            about = "as the first process has it; ms that each stream works"
            Path(arguments.timeline).write_text(draw("A step on several GPUs", about, panels))


if __name__ == "__main__":
    main()
