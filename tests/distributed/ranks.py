"""Processes of a distributed job on a CPU that are started once and run one case after the other.

Starting a process with torch and transformers takes longer than most cases. So a server imports both once and forks the
ranks; those stay, with one process group, until a case fails in one of them.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT = 240.0
"""Seconds that a case may take; a rank that waits for others gives up before that."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.distributed.training"])


class RankFailed(Exception):
    """A case failed: the message has what each rank that failed says."""


class Ranks:
    """``number`` processes in one process group of gloo."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``case(*args)``, a function of a module, returns on each rank.

        Raises:
            RankFailed: one rank raised, ended, or took longer than ``LIMIT``.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((case, args))
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        end = time.monotonic() + LIMIT
        while not failed and len(found) < self.number:
            left = [rank for rank in range(self.number) if rank not in found]
            ready = wait([self._pipes[rank] for rank in left], max(0.0, end - time.monotonic()))
            if not ready:
                failed = dict.fromkeys(left, f"nothing after {LIMIT} s")
            for rank in left:
                if self._pipes[rank] in ready:
                    has_failed, what = self._received(rank)
                    (failed if has_failed else found)[rank] = what
        if failed:
            self.end()
            raise RankFailed("\n".join(f"rank {rank}: {what}" for rank, what in failed.items()))
        return [found[rank] for rank in range(self.number)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.number):
            ours, theirs = _context.Pipe()
            arguments = (rank, self.number, str(Path(self._folder.name, "store")), theirs)
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _received(self, rank: int) -> tuple[bool, Any]:
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return True, "the process ended"


def _serve(rank: int, number: int, store: str, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=number, timeout=timedelta(seconds=LIMIT / 2)
    )
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:
            os._exit(0)  # nobody is there to ask any more
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            pipe.send((False, case(*args)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
