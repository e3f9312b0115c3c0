"""What glue does to every family of models that transformers has: tiny, random weights, beside eager, on a CPU.

    python -m benchmarks.reach [--kinds causal,masked] [--families llama,bloom] [--jobs 1] [--results reach.jsonl]
        [--attention default,eager] [--batches packed,padded,plain] [--modes training,no_grad]
        [--scopes whole,layers,regions]
    python -m benchmarks.reach --page docs/reach.md

A case is right if the loss, every gradient and which gradients are None are eager's (without gradients: the outputs). A
family runs in a process of its own; a case that takes longer than ``--limit`` seconds is a line that says so. Results
are lines of JSON, one for each case; cases that the file has are not run again, so a run that was ended goes on.
``--again`` runs what was not right again. ``--page`` writes the page of the results and runs nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.reach_case import Case, Result, run_case
from benchmarks.reach_configs import MAPPINGS, families

PRELOADED = ("benchmarks.reach_warm",)
"""What a family's process is forked from has imported."""


@dataclasses.dataclass
class Running:
    """A process that runs the cases of a family, the first of ``waiting`` now, since ``started``."""

    process: Any
    receiver: Connection
    waiting: list[Case]
    started: float


def main() -> None:
    arguments = _arguments()
    if arguments.page:
        from benchmarks.reach_page import page

        arguments.page.write_text(page(read_results(arguments.results)))
        return
    known = read_results(arguments.results)
    if arguments.again:
        done = ("right", "not taken")
        known = {name: result for name, result in known.items() if result.status in done and not result.failures}
    work = [[c for c in cases if c.name not in known] for cases in _cases(arguments)]
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with arguments.results.open("a") as file:
        for result in _run([cases for cases in work if cases], arguments.jobs, arguments.limit):
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")
            file.flush()
            done = " ".join(f"{name}={count}" for name, count in result.rewrites.items())
            print(f"{result.case}: {result.status} {result.seconds} s {done} {result.why[:100]}", flush=True)


def read_results(path: Path) -> dict[str, Result]:
    """By case; of one that was run again the last."""
    lines = path.read_text().splitlines() if path.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    return {result.case: result for result in results}


def _cases(arguments: argparse.Namespace) -> Iterator[list[Case]]:
    for kind in arguments.kinds:
        for family in families(kind):
            if arguments.families and family not in arguments.families:
                continue
            ways = (arguments.attention, arguments.batches, arguments.modes, arguments.scopes)
            yield [Case(family, kind, *way) for way in itertools.product(*ways)]


def _run(work: list[list[Case]], jobs: int, limit: float) -> Iterator[Result]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    running: list[Running] = []
    while work or running:
        while work and len(running) < jobs:
            running.append(_start(context, work.pop(0)))
        ready = wait([each.receiver for each in running], timeout=1.0)
        for each in list(running):
            result, ended = None, False
            if each.receiver in ready:
                try:
                    result = each.receiver.recv()
                    case = each.waiting.pop(0)
                    each.started = time.monotonic()
                    ended = not each.waiting
                except EOFError:
                    ended, case = True, each.waiting.pop(0)
                    result = Result(case.name, "failed", f"the process ended ({each.process.exitcode})")
            elif time.monotonic() - each.started > limit:
                ended, case = True, each.waiting.pop(0)
                result = Result(case.name, "out of time", f"more than {limit:.0f} s", seconds=limit)
            if result is not None:
                yield result
            if ended:
                each.process.kill()
                each.process.join()
                running.remove(each)
                if each.waiting:
                    running.append(_start(context, each.waiting))


def _start(context: Any, cases: list[Case]) -> Running:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_family, args=(cases, sender), daemon=True)
    process.start()
    sender.close()
    return Running(process, receiver, list(cases), time.monotonic())


def _run_family(cases: list[Case], sender: Connection) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for case in cases:
        sender.send(run_case(case))


def names(text: str) -> list[str]:
    """Of an option that takes several, with commas between them."""
    return [each for each in text.split(",") if each]


def parser_of_cases(description: str | None) -> argparse.ArgumentParser:
    """With the options that choose among families of models."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=names, default=list(MAPPINGS))
    parser.add_argument("--families", type=names, default=[])
    return parser


def _arguments() -> argparse.Namespace:
    parser = parser_of_cases(__doc__)
    parser.add_argument("--attention", type=names, default=["default"])
    parser.add_argument("--batches", type=names, default=["packed", "padded", "plain"])
    parser.add_argument("--modes", type=names, default=["training"])
    parser.add_argument("--scopes", type=names, default=["whole"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--results", type=Path, default=Path("build/reach.jsonl"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--page", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
