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
_frozen = 0
"""Objects that a conversion has put into the permanent generation."""


@contextlib.contextmanager
def older_objects_left_out() -> Iterator[None]:
    """What exists is in Python's permanent generation meanwhile (``gc.freeze``). Where the user has put objects there,
    nothing is done: nobody can tell them apart afterwards. So it all stays there if the user puts more there meanwhile.
    """
    global _conversions, _frozen
    with _lock:
        _conversions += 1
        if _conversions == 1 and gc.isenabled() and not gc.get_freeze_count():
            gc.freeze()
            _frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        with _lock:
            _conversions -= 1
            if not _conversions and _frozen:
                if gc.get_freeze_count() <= _frozen:
                    gc.unfreeze()
                _frozen = 0
