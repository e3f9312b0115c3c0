"""The folder that one process writes its dump to."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

try:
    import fcntl
except ImportError:  # Windows: processes that dump at the same time need a folder each
    fcntl = None  # type: ignore[assignment]

from glue_compiler.errors import GlueWarning

SUMMARY = "summary.json"
PROCESSES = "process_*"
_LOCK = ".glue_lock"

T = TypeVar("T")


class DumpFolder:
    """Writes files and ``summary.json`` to ``wanted``, or to a folder in it if another process is writing there.

    It is made with the first file; what an earlier process wrote there goes. When the disk is full, or a file is where
    the folder should be, the dump ends with a warning and the program goes on.
    """

    def __init__(self, wanted: Path) -> None:
        self.wanted = wanted
        self.files: list[str] = []
        self._path: Path | None = None
        self._claim: _Claim | None = None  # held for the life of the process
        self._has_failed = False
        self._lock = threading.Lock()

    @property
    def path(self) -> Path | None:
        """Where files go; None if nothing can be written any more."""
        return self._attempt(lambda path: path)

    def write(self, name: str, text: str) -> None:
        def write(path: Path) -> None:
            _replace(path / name, text)
            self.files.append(name)

        self._attempt(write)

    def write_summary(self, text: str) -> None:
        self._attempt(lambda path: _replace(path / SUMMARY, text))

    def _attempt(self, action: Callable[[Path], T]) -> T | None:
        with self._lock:
            if self._has_failed:
                return None
            try:
                return action(self._opened())
            except OSError as error:
                self._has_failed = True
                warnings.warn(
                    f"the dump in {self._path or self.wanted} ends here, and the program goes on without it: {error} "
                    "(option 'dump', or GLUE_DUMP, names the folder)",
                    GlueWarning,
                    stacklevel=3,
                )
                return None

    def _opened(self) -> Path:
        if self._path is None:
            self._path, self._claim = _claim_one(self.wanted)
            _remove_earlier_dump(self._path)
            if self._path == self.wanted:
                _remove_dumps_of_ended_processes(self.wanted)
        return self._path


def _replace(path: Path, text: str) -> None:
    """In one step: a process that is killed, or a full disk, leaves the last complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        # A file name in a graph may be no UTF-8.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _claim_one(wanted: Path) -> tuple[Path, _Claim]:
    """The first folder that no living process holds: ``wanted``, ``wanted/process_PID``, and so on."""
    own = (f"process_{os.getpid()}{suffix}" for suffix in itertools.chain([""], (f"_{n}" for n in itertools.count(2))))
    for path in itertools.chain([wanted], (wanted / name for name in own)):
        if claim := _claim(path):
            return path, claim
    raise AssertionError("names never end")


class _Claim:
    """An open lock file: the lock ends with this object, or with the process."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, self.descriptor)


def _claim(path: Path) -> _Claim | None:
    """A lock on ``path``; None if another process has it."""
    path.mkdir(parents=True, exist_ok=True)
    claim = _Claim(path / _LOCK)
    if fcntl is not None:
        try:
            fcntl.flock(claim.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:  # a file system without locks: processes that dump at the same time need a folder each
            pass
    return claim


def _remove_earlier_dump(folder: Path) -> None:
    """Delete what an earlier process wrote here, and nothing else."""
    summary = folder / SUMMARY
    try:
        names = json.loads(summary.read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    for name in names:
        path = folder / name
        if path.suffix == ".py" and path.resolve().is_relative_to(folder.resolve()):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds other files
                path.parent.rmdir()
    summary.unlink(missing_ok=True)


def _remove_dumps_of_ended_processes(folder: Path) -> None:
    for path in folder.glob(PROCESSES):
        claim = _claim(path) if path.is_dir() else None
        if claim is not None:  # and held until the dump is gone
            _remove_earlier_dump(path)
            (path / _LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.rmdir()
