"""Page-locked host memory of exactly the size asked for."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

from glue_compiler.byte_sizes import with_unit

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices


def page_locked(nbytes: int) -> Tensor:
    """uint8 ``[nbytes]`` of page-locked memory; it goes back to the system with the last tensor on it.

    Not from torch's allocator: that rounds up to powers of two, and takes four times as long, because it locks pages
    of 4 KiB. Whoever drops the last tensor sees to it that no copy is under way: freeing does not wait for one.

    Raises:
        RuntimeError: the system refuses to lock so much.
    """
    mapping = _Mapping.of(nbytes)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    mapping.lock(memory.data_ptr())
    return memory


def locked_copy(host: Tensor) -> Tensor:
    """``host`` in page-locked memory of torch's, or ``host`` itself where the system refuses, as WSL may."""
    try:
        return host.pin_memory()
    except RuntimeError:
        return host


def lock_pages(address: int, nbytes: int) -> Callable[[], object]:
    """Page-lock host memory for copies from and to every CUDA device; the result unlocks it.

    Raises:
        RuntimeError: the driver refuses.
    """
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(status) != 0:
        # The error waits for the next checked launch, which would not be its cause; the binding cannot clear it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
        raise RuntimeError(f"the driver cannot lock {with_unit(nbytes)}: {runtime.cudaGetErrorString(status)}")
    return functools.partial(runtime.cudaHostUnregister, address)


class _Mapping(mmap.mmap):
    """Anonymous memory that unlocks its pages before it goes.

    At the end of a program it may go after this module's globals, so it refers to what it needs then.
    """

    _unlock: Callable[[], object] | None = None
    _locked_by: int | None = None
    _process = staticmethod(os.getpid)

    @classmethod
    def of(cls, nbytes: int) -> _Mapping:
        if not hasattr(mmap, "MAP_PRIVATE"):  # not a POSIX system
            return cls(-1, nbytes)
        mapping = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages are locked faster. Shared with a forked child, copy-on-write would part the pages that the program
        # sees from those that a device writes.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(AttributeError, OSError):  # a system without it
                mapping.madvise(getattr(mmap, advice))
        return mapping

    def lock(self, address: int) -> None:
        self._unlock = lock_pages(address, len(self))
        self._locked_by = self._process()

    def __del__(self) -> None:
        if self._unlock is not None and self._locked_by == self._process():
            self._unlock()
