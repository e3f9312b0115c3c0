"""Numbers that were measured once, in a file that all processes of a user share."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class MeasuredBook:
    """What was measured, by name: a number above 0, or several as a list or tuple. Thread-safe.

    The file is read when a name is first asked for; who has to measure looks again first, for another process may have
    done it, and processes measure one after the other. It is replaced as a whole, so that no reader sees half of it.
    A file that cannot be read or written costs nothing but the measuring.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._known: dict[str, Any] | None = None

    def remembered(self, name: str, measure: Callable[[], Any]) -> Any:
        """What is known of ``name``, or what ``measure`` says now; None, if it says so, is kept for this process."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
            if name not in self._known:
                with self._alone():
                    self._known = {**self._read(), **self._known}
                    if name not in self._known:
                        self._known[name] = measure()
                        self._write(self._known)
            return self._known[name]

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {name: value for name, value in found.items() if _is_measured(value)} if isinstance(found, dict) else {}

    def _write(self, known: dict[str, Any]) -> None:
        beside = self.path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):  # a disk that is full: the next process measures again
            beside.write_text(json.dumps({name: value for name, value in known.items() if _is_measured(value)}))
            beside.replace(self.path)
        with contextlib.suppress(OSError):
            beside.unlink()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Alone among the processes of this machine, where files can be locked."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                self.path.parent.mkdir(parents=True, exist_ok=True)
                fcntl.flock(stack.enter_context(self.path.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
            yield


def _is_measured(value: object) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_measured, value))
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value) and value > 0
