"""Logits as memory that does not exist yet: which rows a view of it holds, and the values once they are computed."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glue_compiler.compat import wrapper_tensors
from glue_compiler.deferred.head import Head
from glue_compiler.deferred.operands import Watched
from glue_compiler.deferred.streams import StreamOrder

CHUNK_BYTES = 256 << 20
"""Of logits that are alive at a time where only a number by row is wanted of them."""


@dataclass(frozen=True)
class Geometry:
    """A strided view of contiguous logits, in numbers of the logits' memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def in_rows(self, words: int) -> Geometry | None:
        """The same with a row for a number, without the last dimension; None if it is not a view of whole rows."""
        if not self.size or self.size[-1] != words or words < 2 or self.stride[-1] != 1 or self.offset % words:
            return None
        strides = [0 if size == 1 else stride for size, stride in zip(self.size[:-1], self.stride[:-1], strict=True)]
        if any(stride % words for stride in strides):
            return None
        return Geometry(self.size[:-1], tuple(stride // words for stride in strides), self.offset // words)


class Memory:
    """The logits that one root and all its views share; contiguous.

    Args:
        rows: ``[*lead, K_k]`` for each term of ``head``, without history.
        watched: hidden states that have to be as they were when ``rows`` are used, then weights, then biases.
    """

    def __init__(self, head: Head, rows: Sequence[Tensor], watched: tuple[Watched, ...], order: StreamOrder) -> None:
        self.head, self.watched, self.order = head, watched, order
        self.rows: tuple[Tensor, ...] = tuple(rows)
        weights, _ = self._parameters()
        self.words = int(weights[0].shape[0])
        self.size = (*rows[0].shape[:-1], self.words)
        self.dtype, self.device = head.dtype(rows, weights), rows[0].device
        self.lock = threading.RLock()
        self._values: Tensor | None = None

    @property
    def exists(self) -> bool:
        return self._values is not None

    def values(self) -> Tensor:
        """All of it: the memory that views share from now on."""
        with self.lock:
            if self._values is None:
                self.check()
                self._values = self.compute(self.rows)
                self.rows = self.watched = ()
        self.order.wait(self._values)
        return self._values

    def compute(self, rows: Sequence[Tensor]) -> Tensor:
        """The logits of ``rows``, contiguous; on the stream where the rows were made. To be checked before."""
        # An inference tensor could not be saved for backward later.
        with self.order.computing(), torch.inference_mode(False), torch.no_grad(), wrapper_tensors.out_of_modes():
            return self.head.logits(rows, *self._parameters()).contiguous()

    def _parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases."""
        tensors = [each.tensor for each in self.watched if not each.is_row]
        return tensors[: len(self.head.terms)], tensors[len(self.head.terms) :]

    def contiguous(self, row: Tensor) -> Tensor:
        if row.is_contiguous():
            return row
        with self.order.computing():
            return row.contiguous()

    def derived(self, head: Head, rows: Sequence[Tensor], are_copies: bool = False) -> Memory:
        """Other logits, from rows of these: views of them, or ``are_copies``."""
        watched = tuple(each for each in self.watched if not (are_copies and each.is_row))
        return Memory(head, rows, watched, self.order)

    def holding(self, values: Tensor) -> Memory:
        """Memory that exists, of any size."""
        memory = copy.copy(self)
        memory.lock, memory._values = threading.RLock(), values
        memory.rows = memory.watched = ()
        return memory

    def check(self, only_rows: bool = False) -> None:
        """Raises if what they come from, or ``only_rows`` of it, is not what it was, or a CUDA graph is captured."""
        self.order.check_not_capturing()  # comparing weights waits for the device
        with wrapper_tensors.out_of_modes():
            for each in self.watched:
                if each.is_row or not only_rows:
                    each.check()


class View:
    """What a deferred tensor and its aliases (``detach``) look at: a part of a memory, in whole rows."""

    def __init__(self, memory: Memory, geometry: Geometry, rows: Geometry | None = None) -> None:
        """``rows``: ``geometry.in_rows``; None for the whole memory."""
        self.memory, self.geometry = memory, geometry
        self._rows = rows
        self._own: Tensor | None = None
        self._traced: Tensor | None = None

    @classmethod
    def whole(cls, memory: Memory) -> View:
        stride = [1]
        for size in reversed(memory.size[1:]):
            stride.append(stride[-1] * max(size, 1))
        return cls(memory, Geometry(memory.size, tuple(reversed(stride)), 0))

    def holding(self, values: Tensor) -> View:
        """A view of other values, which share nothing with these."""
        return View(self.memory.holding(values), Geometry.of(values))

    @property
    def is_computed(self) -> bool:
        return self.memory.exists or self._own is not None

    def shared(self) -> Tensor:
        """The values as a view of the memory: writes are seen by all views, and theirs here."""
        values, it = self.memory.values(), self.geometry
        with wrapper_tensors.out_of_modes():
            return values.as_strided(it.size, it.stride, it.offset)

    def storage(self) -> torch.UntypedStorage:
        """The memory of the values, as an object of its own: to a tracer, the values are another tensor."""
        with wrapper_tensors.out_of_modes():
            return torch.from_dlpack(self.memory.values().detach()).untyped_storage()

    def values_to_trace(self) -> Tensor:
        """The same tensor each time: tracers compare identities."""
        with self.memory.lock:
            if self._traced is None:
                self._traced = self.shared()
            return self._traced

    def values(self) -> Tensor:
        """To be read only: computed for the rows of this view alone if nobody has asked for all."""
        memory = self.memory
        with memory.lock:
            if memory.exists or self._rows is None:
                return self.shared()
            if self._own is None:
                memory.check()
                self._own = self._compute_rows(self._rows)
        memory.order.wait(self._own)
        return self._own

    def rows(self) -> tuple[Tensor, ...]:
        """The hidden states of this view: one for each term, ``[*lead, K_k]``."""
        return self._pick(self._rows)

    def shadow(self) -> Tensor:
        """A tensor on no device that looks like it: views of it tell what views of this one are."""
        it, memory = self.geometry, self.memory
        whole = torch.empty(memory.size, dtype=memory.dtype, device="meta")
        return whole if self._rows is None else whole.as_strided(it.size, it.stride, it.offset)

    def by_chunks(self, reduce: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor] | None:
        """What ``reduce`` makes of logits ``[n, V]``, ``[n, ...]`` each, for chunks of rows whose logits are not kept.

        The results are ``[*lead, ...]``; None if it is computed already, or so small that it is better kept.
        """
        memory = self.memory
        lead = self.geometry.size[:-1]
        row_bytes = memory.words * memory.dtype.itemsize
        chunk = max(1, CHUNK_BYTES // row_bytes)
        if self.is_computed or math.prod(lead) <= chunk or not memory.order.is_here():
            return None
        memory.check()
        rows = [row.reshape(-1, row.shape[-1]) for row in self.rows()]
        parts = [reduce(memory.compute(pieces)) for pieces in zip(*(row.split(chunk) for row in rows), strict=True)]
        return [torch.cat(part).unflatten(0, lead) for part in zip(*parts, strict=True)]

    def _compute_rows(self, rows: Geometry) -> Tensor:
        """As eager has the order of dimensions in memory, so that a view of a result works where it works there."""
        repeated = {dim for dim, stride in enumerate(rows.stride) if stride == 0 and rows.size[dim] > 1}
        order = sorted(range(len(rows.size)), key=lambda dim: (dim not in repeated, -self.geometry.stride[dim]))
        single = Geometry(
            tuple(1 if dim in repeated else rows.size[dim] for dim in order),
            tuple(rows.stride[dim] for dim in order),
            rows.offset,
        )
        computed = self.memory.compute(self._pick(single))
        back = [order.index(dim) for dim in range(len(order))]
        return computed.permute(*back, -1).expand(self.geometry.size)

    def _pick(self, rows: Geometry | None) -> tuple[Tensor, ...]:
        memory = self.memory
        if rows is None:
            return memory.rows
        return tuple(_as_strided(memory.contiguous(row), rows) for row in memory.rows)


def _as_strided(row: Tensor, rows: Geometry) -> Tensor:
    width = row.shape[-1]
    stride = (*(stride * width for stride in rows.stride), 1)
    return row.as_strided((*rows.size, width), stride, row.storage_offset() + rows.offset * width)


class Given(View):
    """Values that are there, as a tracer has them (fake ones) or as its graph returns them.

    Attributes:
        makes_views: are views of it of this class, too? Those are with which Dynamo makes its inputs, and not what
            AOTAutograd's graph returns, which autograd would want gradients of this class for.
    """

    def __init__(self, values: Tensor) -> None:
        self._given = values
        self.makes_views = not wrapper_tensors.is_functional(values)

    def shared(self) -> Tensor:
        return self._given

    def storage(self) -> torch.UntypedStorage:
        return self._given.untyped_storage()

    def values(self) -> Tensor:
        return self._given

    def values_to_trace(self) -> Tensor:
        return self._given
