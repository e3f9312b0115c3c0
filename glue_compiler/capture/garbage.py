"""Garbage collections while a frame is converted look at what the conversion has made, and not at all that was there.

Tracing makes so many objects that Python goes through everything in the process a few times each second.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_conversions = 0
_is_ours = False


@contextlib.contextmanager
def older_objects_left_out() -> Iterator[None]:
    """What exists is in Python's permanent generation meanwhile (``gc.freeze``). Where the user has put objects there,
    nothing is done: nobody can tell them apart afterwards.
    """
    global _conversions, _is_ours
    with _lock:
        _conversions += 1
        if _conversions == 1 and gc.isenabled() and not gc.get_freeze_count():
            gc.freeze()
            _is_ours = True
    try:
        yield
    finally:
        with _lock:
            _conversions -= 1
            if not _conversions and _is_ours:
                gc.unfreeze()
                _is_ours = False
