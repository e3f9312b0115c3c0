"""Copies between a device and the host that run beside compute: streams, events, and what must stay alive meanwhile.

Rules, the same for every caller:

- one stream per device and direction, made on that device; a copy starts after all that the caller's current stream
  holds so far, and the caller's current stream waits for it only where a ``wait_*`` says so;
- what a copy reads or writes stays referenced until its event has passed or a stream waits for it; there is no
  ``record_stream``, which would hold memory back for an unbounded time;
- on a CPU a copy is done when its start returns, and waits do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glue_compiler.compat import runtime
from glue_compiler.ops.pinned_pool import PinnedPool


@dataclass(frozen=True)
class _Copy:
    event: Any
    device: torch.device
    keep: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Streams:
    device_to_host: Any
    host_to_device: Any


class CopyEngine:
    """Starts copies and waits for them. Thread-safe: backward runs in threads of its own."""

    def __init__(self, pool: PinnedPool | None = None) -> None:
        self.pool = pool or PinnedPool()
        self._lock = threading.RLock()
        self._streams: dict[torch.device, _Streams] = {}
        self._in_flight: dict[int, _Copy] = {}
        self._synchronous = False

    def start_offload(self, source: Tensor, pinned_limit: int | None = None) -> Tensor:
        """A host tensor of ``source``'s sizes, dtype and (dense) strides that a copy is filling.

        It may be read on the device after :meth:`start_reload`, on the host after the event only.
        """
        if source.device.type == "cpu":
            return self.pool.take(source, pinned=False).copy_(source)
        _refuse_capture()
        host = self.pool.take(source, pinned=True, limit=pinned_limit)
        stream = self._streams_of(source.device).device_to_host
        self._copy(host, source, stream, key=host, host=host)
        return host

    def wait_offload(self, host: Tensor) -> Any:
        """From here on the current stream may reuse the memory of the source; ``host`` is not yet there to be read.

        Returns:
            The event of the copy, or None if it has ended.
        """
        copy = self._wait(host)
        return None if copy is None else copy.event

    def has_ended(self, host: Tensor) -> bool:
        """Has the copy that fills ``host`` ended? Does not wait."""
        with self._lock:
            copy = self._in_flight.get(host.data_ptr())
        return copy is None or bool(copy.event.query())

    def start_reload(self, host: Tensor, device: torch.device) -> Tensor:
        """A tensor on ``device`` that a copy of ``host`` is filling; to be read after :meth:`wait_reload` only."""
        # Allocated while the caller's stream is current, so the allocator knows it as that stream's memory.
        buffer = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
        if buffer.device.type == "cpu":
            return buffer.copy_(host)
        _refuse_capture()
        self._copy(buffer, host, self._streams_of(buffer.device).host_to_device, key=buffer, host=host)
        return buffer

    def wait_reload(self, buffer: Tensor) -> None:
        """From here on the current stream may read ``buffer``."""
        self._wait(buffer)

    def in_flight(self) -> int:
        """How many copies no stream has waited for and whose event has not passed."""
        with self._lock:
            self._forget_finished()
            return len(self._in_flight)

    def release(self) -> None:
        """Give host memory and streams back; copies end first, those that a stream waits for too."""
        with self._lock:
            for copy in self._in_flight.values():
                copy.event.synchronize()
            self.pool.synchronize()
            self._in_flight.clear()
            self._streams.clear()
            self.pool.release()

    @contextmanager
    def synchronised(self) -> Iterator[None]:
        """Every copy inside has ended when its start returns: a result that differs from one without is a race."""
        before, self._synchronous = self._synchronous, True
        try:
            yield
        finally:
            self._synchronous = before

    def _copy(self, into: Tensor, source: Tensor, stream: Any, *, key: Tensor, host: Tensor) -> None:
        device = stream.device
        block = self.pool.block_of(host)
        # Taken before stream is made current: inside, current_stream() is the copy stream itself.
        stream.wait_stream(torch.cuda.current_stream(device))
        if block is not None and block.last_copy is not None:
            stream.wait_event(block.last_copy)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            event = stream.record_event()
        if block is not None:
            block.last_copy = event
        # Memory that the pool gave up goes with its last tensor, however far a copy is.
        if self._synchronous or block is None:
            event.synchronize()
        with self._lock:
            self._forget_finished()
            if key.numel():
                self._in_flight[key.data_ptr()] = _Copy(event, device, (into, source))

    def _wait(self, key: Tensor) -> _Copy | None:
        with self._lock:
            copy = self._in_flight.pop(key.data_ptr(), None)
        if copy is not None:
            torch.cuda.current_stream(copy.device).wait_event(copy.event)
        return copy

    def _forget_finished(self) -> None:
        """What nobody waited for, because a forward or a backward ended early, must not stay for ever."""
        for key in [key for key, copy in self._in_flight.items() if copy.event.query()]:
            del self._in_flight[key]

    def _streams_of(self, device: torch.device) -> _Streams:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))
            return self._streams[device]


def why_no_copies(device: torch.device) -> str | None:
    """Why tensors of ``device`` stay where they are, or None."""
    if device.type in ("cuda", "cpu"):
        return None
    return f"copies beside compute are written for CUDA devices, not for '{device.type}'"


def _refuse_capture() -> None:
    if runtime.is_capturing():
        raise RuntimeError(
            "checkpoint offload cannot be captured in a CUDA graph: a replay would use host memory that is reused; "
            "capture a model that is compiled without it"
        )


engine = CopyEngine()
"""The process's engine: compiled graphs call it by operator name, so there is one."""
