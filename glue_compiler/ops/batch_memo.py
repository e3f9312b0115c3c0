"""Results of batch prologues at run time: computed in a batch's first call, found by all others, gone with the batch.

A batch is known by the memory of its tensors: the storage (held weakly, so that it is freed as if nobody looked), where
in it a tensor lies, and autograd's version counter, which every in-place operator of torch advances. What this cannot
see is listed in docs/memoize_metadata.md.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from glue_compiler import compat
from glue_compiler.compat import runtime

MAX_BATCHES = 4
"""Batches that one prologue remembers: those in flight in a pipeline, or one on each device. The oldest goes first."""

Results = tuple[Any, ...]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def identity_of(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """What tells a prologue's inputs from all other inputs, while their storages live; None where nothing does.

    Args:
        values: tensors and Python integers.

    Returns:
        hashable. None, which means "compute": under a dispatch mode, for tensor subclasses, tensors inside of functorch
        transforms, inference tensors (they have no version counter), lazily negated ones, and memory that others than
        torch can write (``resizable()`` is false for what came from or went to numpy, or came through DLPack; shared
        memory belongs to several processes); while a CUDA graph is captured, because its replays read new data.
    """
    if runtime.in_dispatch_mode():
        return None
    identity: list[Any] = []
    for value in values:
        if type(value) is int:
            identity.append(value)
            continue
        if type(value) not in _PLAIN or compat.is_functorch_wrapped(value):
            return None
        if value.is_inference() or value.is_neg():
            return None
        storage = value.untyped_storage()
        if not storage.resizable():
            return None
        if value.is_cuda:
            if runtime.is_capturing():
                return None
        elif storage.is_shared():
            return None
        identity += (
            id(storage),  # torch keeps the Python object as long as the storage, so this is unique until it dies
            value.data_ptr(),
            value._version,
            value.shape,
            value.stride(),
            value.dtype,
        )
    return tuple(identity)


@dataclass(eq=False)
class _Entry:
    """One batch: the results, and the CUDA streams on which they are ready."""

    results: Results
    storages: list[weakref.ref[torch.UntypedStorage]]
    computed: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    ready_on: set[tuple[torch.device, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for device in {result.device for result in self.results if _is_cuda(result)}:
            with torch.cuda.device(device):
                self.computed[device] = torch.cuda.Event()
                self.computed[device].record()
            self.ready_on.add((device, runtime.stream_id(device)))

    def wait_until_ready(self) -> None:
        """Make the current streams wait for the streams that computed the results, without stopping the host."""
        for device, event in self.computed.items():
            here = (device, runtime.stream_id(device))
            if here in self.ready_on:
                continue
            stream = torch.cuda.current_stream(device)
            stream.wait_event(event)
            for result in self.results:
                if _is_cuda(result) and result.device == device:
                    # The entry may die on the host before this stream has read the results.
                    result.record_stream(stream)
            self.ready_on.add(here)


class PrologueResults:
    """The results of one prologue, by batch. Thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, identity: tuple[Any, ...]) -> Results | None:
        entry = self._entries.get(identity)
        if entry is None:
            return None
        if entry.computed:
            entry.wait_until_ready()
        return entry.results

    def put(self, identity: tuple[Any, ...], values: Sequence[Any], results: Results) -> None:
        """Remember ``results`` until one of the tensors in ``values`` loses its storage."""
        if not all(_is_plain_result(result) for result in results):
            return
        # Called wherever the storage dies, also inside of `with self._lock`: it must not take the lock.
        forget = functools.partial(_forget, weakref.ref(self), identity)
        storages = [weakref.ref(v.untyped_storage(), forget) for v in values if isinstance(v, torch.Tensor)]
        entry = _Entry(results, storages)
        with self._lock:
            self._entries[identity] = entry
            for oldest in list(self._entries)[:-MAX_BATCHES]:
                self._entries.pop(oldest, None)


def _forget(memo: weakref.ref[PrologueResults], identity: tuple[Any, ...], _: Any) -> None:
    if (found := memo()) is not None:
        found._entries.pop(identity, None)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _is_plain_result(value: Any) -> bool:
    return type(value) is int or (type(value) is torch.Tensor and not value.is_inference())


class BatchMemo:
    """The prologues of a process. Equal ones share their results; those that no compiled graph uses are dropped."""

    def __init__(self) -> None:
        self._prologues: weakref.WeakValueDictionary[Hashable, PrologueResults] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def results_of(self, key: Hashable) -> PrologueResults:
        """Where the results of the prologue with this key are kept; the caller keeps it alive."""
        with self._lock:
            return self._prologues.setdefault(key, PrologueResults())


def memoized(
    rest: Callable[..., Any], prologue: Callable[..., Any], inputs: Sequence[int], memo: PrologueResults
) -> Callable[..., Any]:
    """The captured graph again: run ``prologue`` if its results for these inputs are not known, then ``rest``.

    Args:
        rest: takes the captured graph's inputs, and the prologue's results after them.
        prologue: takes those of the inputs whose positions are in ``inputs``; pure; no result shares memory with them.
    """
    inputs = tuple(inputs)

    def call(*args: Any) -> Any:
        values = [args[i] for i in inputs]
        identity = identity_of(values)
        results = memo.get(identity) if identity is not None else None
        if results is None:
            results = _compute(prologue, values)
            if identity is not None:
                memo.put(identity, values, results)
        return rest(*args, *results)

    return call


def _compute(prologue: Callable[..., Any], values: Sequence[Any]) -> Results:
    # What a call under inference_mode computes, a training step may find and save for its backward.
    with torch.inference_mode(False), torch.no_grad():
        return tuple(prologue(*values))
