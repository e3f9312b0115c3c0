"""Does a step stay within its memory budget? Peaks under many budgets, with totals of tokens that vary each step.

    python -m benchmarks.budget_peaks [--rows qwen3-8b-lora@4096x16,llama-bf16@8192x16] [--budgets 20]

Rows are those of ``benchmarks.end_to_end``, checkpointed, AdamW included; ``@4096x16`` behind a row's name: at most
4,096 tokens in a step, and 16 layers. Each row runs in a process of its own, beside the others: times are not shown.
Budgets lie between the peak where all layers compute again and a little above the one where all keep.

For each row: how many steps of all budgets were above their budget, and the smallest and median share of the budget
that the steps of a budget took at most, once layers keep what fits (from the third step on; the first two measure).
``--each`` prints a line for each budget.

On a CPU, to test the code: ``--device cpu --compiler aot_eager --budgets 1``; no memory is counted there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.end_to_end import started_process
from benchmarks.end_to_end_rows import ROWS, Workload, sized
from benchmarks.end_to_end_variants import variant_of
from benchmarks.peers import base_of

ROWS_BY_DEFAULT = ("qwen3-8b-lora@4096x16", "qwen3-14b-qlora@2048x16", "llama-bf16@8192x16", "gpt-oss@2048x4")
GIB = 2**30
MEASURING = 2
"""Steps that show what layers take."""
COLUMNS = ("budgets", "GiB", "steps", "above", "smallest share", "median share")


class Steps:
    """Of one model and its optimizer, which each budget trains on."""

    def __init__(self, row: str, device: str, compiler: str) -> None:
        torch.manual_seed(0)
        name, self.size = sized(row, device)
        self.device, self.compiler = device, compiler
        self.workload: Workload = ROWS[name].build(self.size, device, "sdpa")
        base_of(self.workload).gradient_checkpointing_enable({"use_reentrant": False})
        trained = [weight for weight in self.workload.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")

    def peaks(self, variant: str, number: int) -> Iterator[int]:
        """The most bytes in each of ``number`` steps, compiled anew as ``variant`` has it."""
        torch._dynamo.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # for the other rows
        call = variant_of(variant).compiled(self.workload, self.compiler)
        generator = torch.Generator().manual_seed(0)
        for step in range(number):
            # The longest comes first and in the end: what is planned for is what was seen.
            drawn = int(torch.randint(self.size.least, self.size.tokens + 1, (), generator=generator))
            batch = self.workload.batch(self.size.tokens if step in (0, 1, number - 1) else drawn, generator)
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with self.workload.around():
                loss = call(**batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield torch.cuda.max_memory_allocated() if self.device == "cuda" else 0


def measure(pipe: Connection, row: str, arguments: argparse.Namespace) -> None:
    """Sends a dict for each budget: bytes of the budget, and the peaks of its steps."""
    warnings.simplefilter("ignore")
    steps = Steps(row, arguments.device, arguments.compiler)
    least, most = (max(list(steps.peaks(kind, 4))[1:]) for kind in ("glue-regions", f"plan-{2**50}-regions"))
    for place in range(arguments.budgets):
        budget = int(least * 1.04 + (most * 1.02 - least * 1.04) * place / max(1, arguments.budgets - 1)) or GIB
        start = time.monotonic()
        found = list(steps.peaks(f"plan-{budget}-regions", arguments.steps))
        pipe.send({"budget": budget, "peaks": found, "seconds": time.monotonic() - start})
    pipe.send(None)


def line(row: str, found: Sequence[dict[str, Any]]) -> str:
    if not found:
        return f"| {row} | nothing was measured in time |"
    above = sum(peak > each["budget"] for each in found for peak in each["peaks"])
    shares = [max(each["peaks"][MEASURING:]) / each["budget"] for each in found]
    ends = f"{found[0]['budget'] / GIB:.2f} to {found[-1]['budget'] / GIB:.2f}"
    steps = sum(len(each["peaks"]) for each in found)
    cells = (row, len(found), ends, steps, above, f"{min(shares):.3f}", f"{statistics.median(shares):.3f}")
    return f"| {' | '.join(map(str, cells))} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS_BY_DEFAULT))
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8, help="under each budget")
    parser.add_argument("--each", action="store_true", help="a line of JSON for each budget")
    parser.add_argument("--limit", type=float, default=540, help="seconds; budgets that come later are left out")
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    arguments = parser.parse_args(argv)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    rows = arguments.rows.split(",")
    if unknown := [row for row in rows if row.partition("@")[0] not in ROWS]:
        parser.error(f"there is no row '{unknown[0]}'; known are {', '.join(ROWS)}")
    end = time.monotonic() + arguments.limit
    running = {row: started_process(measure, row, arguments) for row in rows}
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in rows}
    while running and (left := end - time.monotonic()) > 0:
        for pipe in wait([pipe for _, pipe in running.values()], left):
            row = next(name for name, (_, other) in running.items() if other is pipe)
            try:
                each = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                each = None
            if each is None:
                del running[row]
                continue
            found[row].append(each)
            if arguments.each:
                print(json.dumps({"row": row, **each}), flush=True)
    for process, _ in running.values():  # not done by the limit
        process.terminate()
    print(f"| row | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}")
    for row in rows:
        print(line(row, found[row]), flush=True)


if __name__ == "__main__":
    main()
