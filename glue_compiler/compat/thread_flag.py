"""What is on for a while, in one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ThreadFlag(threading.local):
    """``is_on`` inside of ``with flag.on():``, in the thread that is there."""

    is_on = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        before, self.is_on = self.is_on, True
        try:
            yield
        finally:
            self.is_on = before
