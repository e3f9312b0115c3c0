"""Runs a program again and again, each time as the first: with the same standard input, and not for ever."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_PATIENCE = (10.0, 60.0)
"""Without a limit of the user's: so many times as long as the longest run that ended, and so many seconds more."""


@dataclass(frozen=True)
class ProgramRun:
    """``code`` is the exit code; None for a run that was ended because it took too long."""

    code: int | None
    output: str
    seconds: float


@dataclass
class ProgramRuns:
    """Runs ``command``.

    Args:
        limit: seconds that a run may take. None: much longer than the longest one before; the first has no limit.
    """

    command: Sequence[str]
    limit: float | None = None
    longest: float | None = None
    given: SharedInput = field(default_factory=lambda: SharedInput(own_input()))

    def run(self, environment: Mapping[str, str], log: Path) -> ProgramRun:
        """Output of both kinds goes to ``log``. What is no UTF-8 in it is shown as ``\\xff``."""
        limit = self.limit
        if limit is None and self.longest is not None:
            limit = self.longest * _PATIENCE[0] + _PATIENCE[1]
        start = time.monotonic()
        with log.open("wb") as output:
            # In a session of its own, so that its children end with it.
            process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with self.given.feeding(process):
                code = _wait(process, limit)
        seconds = time.monotonic() - start
        if code is not None:
            self.longest = max(seconds, self.longest or 0.0)
        return ProgramRun(code, log.read_bytes().decode("utf-8", errors="backslashreplace"), seconds)


def _wait(process: subprocess.Popen[bytes], limit: float | None) -> int | None:
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return None
    except BaseException:  # Ctrl-C does not reach another session
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


class SharedInput:
    """Our own standard input, for one program after the other: each gets what was read before, then what is left.

    It is read as far as programs take it, so an input that never ends stops nobody. A terminal is not read.
    """

    def __init__(self, source: int | None) -> None:
        self._source = source
        self._read = bytearray()

    @contextlib.contextmanager
    def feeding(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Feeds ``process`` while the block runs."""
        done = threading.Event()
        thread = threading.Thread(target=self._feed, args=(process.stdin, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(1.0)  # a process that outlives the program may hold the other end

    def _feed(self, stdin: IO[bytes], done: threading.Event) -> None:
        with contextlib.suppress(BrokenPipeError), stdin:  # it ended, or closed its input
            stdin.write(self._read)
            stdin.flush()
            while self._source is not None and not done.is_set():
                if not select.select([self._source], [], [], 0.1)[0]:
                    continue
                more = os.read(self._source, 2**16)
                self._read += more
                if not more:
                    self._source = None
                stdin.write(more)
                stdin.flush()


def own_input() -> int | None:
    """Our standard input; None for a terminal, and where there is no input."""
    try:
        number = sys.stdin.fileno()
        return None if os.isatty(number) or os.name == "nt" else number
    except (AttributeError, OSError, ValueError):
        return None
