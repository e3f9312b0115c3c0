"""Results of batch prologues at run time: computed in a batch's first call, found by all others, gone with the batch.

A batch is looked up by where its tensors lie: the storage (held weakly, so that it is freed as if nobody looked) and
the place in it. Whether the memory still holds what the results were computed from is asked in each call:

- on the host, the memory is compared with a copy. No writer escapes that, whatever it writes through;
- on a device, the host cannot look without the wait that the memo is there to save. Two things stand for it:
  autograd's version counter, which every in-place operator advances, and the pass. Memory may be written past the
  counter (``.data``, ``set_``, its storage, a tensor that shares the memory and not the counter, a collective), so
  results serve one forward pass and one backward of it; the next pass over the same memory computes again. What remains
  is said in docs/memoize_metadata.md.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from glue_compiler.compat import runtime, symbols
from glue_compiler.ops.host_memory import holds_same

MAX_BATCHES = 4
"""Batches that one prologue remembers: those in flight in a pipeline, or one on each device. The oldest goes first."""

Results = tuple[Any, ...]
Caller = torch.nn.Parameter | None
"""What tells a layer from the others: its first parameter."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def key_of(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """Where a prologue's inputs lie, while their storages live; None where their contents cannot be vouched for.

    Args:
        values: tensors and Python integers.

    Returns:
        hashable. None, which means "compute": under a dispatch mode; while a CUDA graph is captured, because its
        replays read new data; for tensor subclasses and tensors inside of functorch transforms; and on a device, for
        inference tensors (they have no version counter), lazily negated ones, and memory that others than torch can
        write (``resizable()`` is false for what came through DLPack or from another process).
    """
    if runtime.in_dispatch_mode() or runtime.is_capturing():
        return None
    key: list[Any] = []
    for value in values:
        if type(value) is int:
            key.append(value)
            continue
        if type(value) not in _PLAIN or symbols.is_functorch_wrapped(value):
            return None
        storage = value.untyped_storage()
        if not value.is_cpu and (value.is_inference() or value.is_neg() or not storage.resizable()):
            return None
        key += (
            id(storage),  # torch keeps the Python object as long as the storage, so this is unique until it dies
            value.data_ptr(),
            value.shape,
            value.stride(),
            value.dtype,
        )
    return tuple(key)


class _Pass:
    """One forward pass and one backward of it, as far as calls tell: in each, every caller comes once.

    It ends with the first of its callers that is gone: weights that are made anew for each pass (a view of a shard,
    say) never come again.
    """

    def __init__(self, caller: Caller) -> None:
        self._began = self._now()
        self._backward: int | None = None
        self._came: set[tuple[int, int]] = set()
        self._alive: list[weakref.ref[Any]] = []
        self._gone: list[weakref.ref[Any]] = []
        self._note(self._began, caller)

    def includes(self, caller: Caller) -> bool:
        """Is a call by ``caller``, here and now, still of this pass? Notes that it came."""
        now = self._now()
        if now != self._began:
            if now < 0 or self._began >= 0 or self._backward not in (None, now):
                return False
            self._backward = now
        if self._gone or (now, id(caller)) in self._came:
            return False
        self._note(now, caller)
        return True

    def _note(self, now: int, caller: Caller) -> None:
        self._came.add((now, id(caller)))
        if caller is not None:
            self._alive.append(weakref.ref(caller, self._gone.append))

    @staticmethod
    def _now() -> int:
        """Which backward is under way; a negative number in a forward, another one with gradients than without."""
        backward = runtime.backward_id()
        return backward if backward is not None else -1 - torch.is_grad_enabled()


class _Contents:
    """What a call's tensors held: copies of host memory, version counters of device memory and the pass."""

    def __init__(self, values: Sequence[Any], caller: Caller) -> None:
        self._copies: list[tuple[int, torch.Tensor]] = []
        self._versions: list[tuple[int, int]] = []
        self._counters: dict[int, int] = {}
        for i, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                continue
            if not value.is_inference():
                self._counters[id(value.untyped_storage())] = value._version
            if value.is_cpu:
                self._copies.append((i, value.clone()))
            else:
                self._versions.append((i, value._version))
        self._pass = _Pass(caller) if self._versions else None

    def are_in(self, values: Sequence[Any], caller: Caller) -> bool:
        """Do ``values`` hold this still?"""
        for i, version in self._versions:
            if values[i]._version != version:
                return False
        for i, copy in self._copies:
            if not holds_same(values[i], copy):
                return False
        return self._pass is None or self._pass.includes(caller)

    def are_later_than(self, other: _Contents) -> bool:
        """Has a counter advanced since? True says that ``other`` is gone; False says nothing."""
        return any(self._counters.get(storage, version) != version for storage, version in other._counters.items())


@dataclass(eq=False)
class _Entry:
    """One batch: the results, what they were computed from, and the CUDA streams on which they are ready."""

    results: Results
    contents: _Contents
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

    def get(self, key: tuple[Any, ...], values: Sequence[Any], caller: Caller) -> Results | None:
        """The results for ``values``, which lie at ``key``, if they hold what they held when they were computed.

        Args:
            caller: tells a layer from the others. Where the host cannot read the values, one that comes again begins
                a new pass.
        """
        entry = self._entries.get(key)
        if entry is None or not entry.contents.are_in(values, caller):
            return None
        if entry.computed:
            entry.wait_until_ready()
        return entry.results

    def put(self, key: tuple[Any, ...], values: Sequence[Any], caller: Caller, results: Results) -> None:
        """Remember ``results`` until one of the tensors in ``values`` loses its storage, or is known to be written."""
        if not all(_is_plain_result(result) for result in results):
            return
        # Called wherever the storage dies, also inside of `with self._lock`: it must not take the lock.
        forget = functools.partial(_forget, weakref.ref(self), key)
        storages = [weakref.ref(v.untyped_storage(), forget) for v in values if isinstance(v, torch.Tensor)]
        entry = _Entry(results, _Contents(values, caller), storages)
        with self._lock:
            # A buffer that is filled again for each batch, perhaps with another length, has one batch at a time.
            gone = [
                k for k, other in self._entries.items() if k == key or entry.contents.are_later_than(other.contents)
            ]
            for dead in gone:
                self._entries.pop(dead, None)
            self._entries[key] = entry
            for oldest in list(self._entries)[:-MAX_BATCHES]:
                self._entries.pop(oldest, None)


def _forget(memo: weakref.ref[PrologueResults], key: tuple[Any, ...], _: Any) -> None:
    if (found := memo()) is not None:
        found._entries.pop(key, None)


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
        key = key_of(values)
        if key is None:
            return rest(*args, *_compute(prologue, values))
        # Layers share compiled code, and may be compiled again; what tells them apart is a parameter.
        caller = next((arg for arg in args if isinstance(arg, torch.nn.Parameter)), None)
        results = memo.get(key, values, caller)
        if results is None:
            results = _compute(prologue, values)
            memo.put(key, values, caller, results)
        return rest(*args, *results)

    return call


def _compute(prologue: Callable[..., Any], values: Sequence[Any]) -> Results:
    # What a call under inference_mode computes, a training step may find and save for its backward.
    with torch.inference_mode(False), torch.no_grad():
        return tuple(prologue(*values))
