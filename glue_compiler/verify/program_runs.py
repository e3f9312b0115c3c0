"""Runs a program again and again, each time as the first: without a standard input, and not for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
                stdin=subprocess.DEVNULL,  # the same in each run
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
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
