"""Orders what is computed late among CUDA streams as if it had been computed at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from glue_compiler.compat.runtime import is_capturing
from glue_compiler.errors import GlueDeferredError


class StreamOrder:
    """Computes on the stream that is current now, and makes whoever reads on another one wait.

    A reader on another stream waits only for what was there when the logits were made, as far as it knows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._computed: torch.cuda.Event | None = None

    def is_here(self) -> bool:
        """Is the stream where it computes the current one?"""
        return self._stream is None or torch.cuda.current_stream(self._device) == self._stream

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else self._on_stream(self._stream)

    def check_not_capturing(self) -> None:
        """Raises where a CUDA graph is captured: nothing may wait for the device there, nor be computed late."""
        if self._stream is not None and is_capturing():
            raise GlueDeferredError(
                "deferred logits are read for the first time while a CUDA graph is captured, whose replays would "
                'compute them anew. Read them before the capture, or compile with options={"logits": "kept"}.'
            )

    @contextmanager
    def _on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        self.check_not_capturing()
        with torch.cuda.stream(stream):
            yield
            self._computed = torch.cuda.Event()
            self._computed.record(stream)

    def wait(self, values: Tensor) -> None:
        """Called by a reader of ``values``, which were computed here."""
        if self._computed is not None and not self.is_here():
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._computed)
            values.record_stream(stream)
