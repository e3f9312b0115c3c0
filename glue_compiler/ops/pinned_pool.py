"""Host memory that copies from and to a device reuse from step to step."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glue_compiler.byte_sizes import with_unit
from glue_compiler.compat import storages
from glue_compiler.errors import GlueWarning
from glue_compiler.ops.page_locked import page_locked

Allocate = Callable[[int, bool], Tensor]


def allocate_host(nbytes: int, pinned: bool) -> Tensor:
    """uint8 ``[nbytes]``. Raises RuntimeError where pinning is refused."""
    return page_locked(nbytes) if pinned else torch.empty(nbytes, dtype=torch.uint8)


class Block:
    """A piece of host memory.

    ``last_copy`` is the event of the latest copy that reads or writes it, or None: whoever writes it next waits for
    that, because a tensor may be freed by the program while the device still reads it.
    """

    def __init__(self, memory: Tensor, pinned: bool) -> None:
        self.memory = memory
        self.pinned = pinned
        self.last_copy: Any = None
        self._unused = storages.use_count(memory)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    @property
    def is_free(self) -> bool:
        """No tensor but the pool's own refers to the memory: this needs no call from whoever drops a tensor."""
        return storages.use_count(self.memory) == self._unused

    def wait(self) -> None:
        """Wait, on the host, for the copies from and to it."""
        if self.last_copy is not None:
            self.last_copy.synchronize()

    def tensor(self, like: Tensor) -> Tensor:
        """A tensor of its own (no view) on this memory, with the sizes, dtype and dense strides of ``like``."""
        strides = like.stride() if like.is_contiguous() else torch.empty_like(like, device="meta").stride()
        made = torch.empty(0, dtype=like.dtype)
        made.set_(self.memory.untyped_storage(), 0, like.size(), strides)
        return made


class PinnedPool:
    """Blocks of host memory by size. A block is free again when the last tensor on it is gone.

    Thread-safe. Pinning is slow (about 20 ms for a buffer of 128 MiB), hence the reuse.
    """

    def __init__(self, allocate: Allocate = allocate_host) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._blocks: dict[int, Block] = {}
        self._warned = False
        self.pinning_seconds = 0.0
        """Time spent on getting page-locked memory so far."""

    def take(self, like: Tensor, *, pinned: bool, limit: int | None = None) -> Tensor:
        """A tensor of ``like``'s sizes and dtype on the host, with undefined content.

        With ``pinned``, page-locked memory as long as the pool then holds at most ``limit`` bytes of it; beyond that,
        and where the system refuses, ordinary memory, with one warning: copies are then slower and not hidden.
        """
        nbytes = max(1, like.numel() * like.element_size())
        with self._lock:
            return self._block(nbytes, pinned, limit).tensor(like)

    def block_of(self, host: Tensor) -> Block | None:
        """The block that ``host`` lies on; None for a tensor of another origin."""
        with self._lock:
            return self._blocks.get(host.untyped_storage().data_ptr())

    def pinned_bytes(self) -> int:
        """Of page-locked blocks, without what is left of their last pages."""
        return sum(block.nbytes for block in list(self._blocks.values()) if block.pinned)

    def held_bytes(self) -> int:
        """Of all blocks, page-locked or not."""
        return sum(block.nbytes for block in list(self._blocks.values()))

    def synchronize(self) -> None:
        """Wait, on the host, for every copy from or to these blocks."""
        for block in list(self._blocks.values()):
            block.wait()

    def release(self) -> None:
        """Forget all blocks: free ones go back to the system now, others with their last tensor."""
        with self._lock:
            self._blocks.clear()
            self._warned = False

    def _block(self, nbytes: int, pinned: bool, limit: int | None) -> Block:
        fitting = [b for b in self._blocks.values() if nbytes <= b.nbytes <= 2 * nbytes and b.pinned == pinned]
        free = [block for block in sorted(fitting, key=lambda block: block.nbytes) if block.is_free]
        if free:
            return free[0]
        if pinned:
            self._make_room(nbytes, limit)
            if limit is not None and self.pinned_bytes() + nbytes > limit:
                self._warn(f"the limit of {with_unit(limit)} of pinned memory is reached")
                return self._block(nbytes, False, None)
        start = time.perf_counter()
        try:
            memory = self._allocate(nbytes, pinned)
        except RuntimeError as error:
            if not pinned:
                raise
            self._warn(f"pinning {with_unit(nbytes)} of host memory was refused ({str(error).splitlines()[0]})")
            return self._block(nbytes, False, None)
        if pinned:
            self.pinning_seconds += time.perf_counter() - start
        block = Block(memory, pinned)
        self._blocks[memory.untyped_storage().data_ptr()] = block
        return block

    def _make_room(self, nbytes: int, limit: int | None) -> None:
        """Give free blocks of other sizes back, if the limit asks for it."""
        if limit is None:
            return
        for key, block in list(self._blocks.items()):
            if self.pinned_bytes() + nbytes <= limit:
                return
            if block.pinned and block.is_free:
                block.wait()
                del self._blocks[key]

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"checkpoint offload uses pageable host memory: {why}. Results stay right; copies are slower and hold "
                "up the program. Set options={'pinned_limit': ...}, or raise the limit on locked memory.",
                GlueWarning,
                stacklevel=4,
            )
