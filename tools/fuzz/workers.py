"""Runs a level in one process, or in several, each with a seed of its own.

A worker says before each program which one it is at, and what it has done so far. So one that dies takes nothing with
it: the program that killed it is a failure, and another worker goes on behind it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from tools.fuzz.campaign import run_programs
from tools.fuzz.failures import Failure
from tools.fuzz.graph_campaign import run_graphs
from tools.fuzz.tally import Reporter, Settings, Tally

LEVELS = {"graphs": run_graphs, "programs": run_programs}
_SEEDS_APART = 1_000_003


def run(level: str, settings: Settings) -> Tally:
    return LEVELS[level](settings, _reporter(settings))


def run_in(workers: int, level: str, settings: Settings) -> Tally:
    """``settings.count`` is shared among the workers.

    Raises:
        RuntimeError: if a worker dies before it has drawn anything.
    """
    if workers == 1:
        return run(level, settings)
    each = [dataclasses.replace(settings, seed=settings.seed + _SEEDS_APART * n) for n in range(workers)]
    if settings.count is not None:
        each = [dataclasses.replace(own, count=-(-settings.count // workers)) for own in each]
    total, reporter, start = Tally(level), _reporter(settings), time.monotonic()
    running = [_Worker.started(level, own) for own in each]
    while running:
        for connection in wait([worker.connection for worker in running]):
            worker = next(each for each in running if each.connection is connection)
            if worker.hears():
                continue
            running.remove(worker)
            total.add(worker.tally)
            if not worker.is_done:
                reporter.add(worker.death(), total)
                rest = worker.rest(settings.seconds - (time.monotonic() - start))
                running += [_Worker.started(level, rest)] if rest is not None else []
    total.seconds = time.monotonic() - start
    return total


def _reporter(settings: Settings) -> Reporter:
    return Reporter(lambda text: print(text, flush=True), settings.keep)


@dataclass
class _Worker:
    """A process, and the last that it said: what it had done before it drew program ``number``."""

    level: str
    settings: Settings
    process: Any
    connection: Any
    tally: Tally
    number: int | None = None
    is_done: bool = False

    @classmethod
    def started(cls, level: str, settings: Settings) -> _Worker:
        # A new process imports this module by its name; it would not find what is in __main__.
        context = multiprocessing.get_context("spawn")
        ours, its = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(LEVELS[level], settings, its), daemon=True)
        process.start()
        its.close()  # so that ours ends with the process
        return cls(level, settings, process, ours, Tally(level))

    def hears(self) -> bool:
        """False: it has ended."""
        try:
            self.number, self.tally, self.is_done = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return False
        return True

    def death(self) -> Failure:
        if self.number is None:
            raise RuntimeError(f"a worker of the fuzzer does not start (exit code {self.process.exitcode})")
        wrong = f"the worker died (exit code {self.process.exitcode})"
        origin = f"seed {self.settings.seed}, {self.level} from {self.number}"
        kinds = " ".join(f"--kind {kind}" for kind in self.settings.kinds)
        only = f" --pass {self.settings.only}" if self.settings.only else ""
        again = f"--level {self.level} --seed {self.settings.seed} --first {self.number} --count 1 {kinds}{only}"
        script = f"# {wrong}; again:\n# python -m tools.fuzz {again}\n"
        return Failure("worker", f"a worker died | {self.level} {self.process.exitcode}", (wrong,), script, origin)

    def rest(self, seconds: float) -> Settings | None:
        """What there is to do behind the program that it died of."""
        count = self.settings.count
        left = None if count is None else count - self.tally.ran
        if seconds <= 0 or left == 0 or self.number is None:
            return None
        return dataclasses.replace(self.settings, first=self.number + 1, seconds=seconds, count=left)


def _work(level: Callable[[Settings, Reporter], Tally], settings: Settings, connection: Connection) -> None:
    reporter = _reporter(settings)
    reporter.on_progress = lambda number, tally: connection.send((number, tally, False))
    try:
        tally = level(settings, reporter)
    except Exception:  # what has leaked out of a program may be in the next ones' way: a process ends with it
        traceback.print_exc()
        raise SystemExit(1) from None
    connection.send((None, tally, True))
