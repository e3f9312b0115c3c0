"""Checkpoint offload where the checkpoint is outside of what is compiled: layers compiled one by one, or eager code."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from glue_compiler.compat import checkpoint_calls, features, saved_tensor_hooks
from glue_compiler.compat.checkpoint_calls import SavingCall
from glue_compiler.errors import GlueWarning
from glue_compiler.fx.values import keeps_layout
from glue_compiler.ops.copy_engine import CopyEngine, engine, why_no_copies

BUFFERS = 2


@contextmanager
def offload_checkpoints(pinned_limit: int | None = None) -> Iterator[None]:
    """Move the inputs of checkpointed regions to host memory until backward needs them.

    ::

        with glue_compiler.offload_checkpoints():
            loss = model(batch)  # calls torch.utils.checkpoint around each layer, compiled or not
            loss.backward()

    Around the forward is enough; backward may run outside.

    Copies run on streams of their own: to the host while the next regions compute, at most two at a time; back while
    the region before (in backward's order) computes, at most two buffers alive. Which one comes next is taken from the
    order of the forward. The last region's input stays on the device. Moved are a region's tensor arguments that need
    a gradient and are no leaves; masks and rotary tables that all regions share stay. A compiled graph with the
    checkpoint inside (transformers 5.23, each layer compiled) is a region too: it saves nothing as large as its inputs.
    Calls do not nest: the innermost one acts.

    Args:
        pinned_limit: the most bytes of page-locked memory that the process's pool may hold; None: no limit.

    Raises:
        RuntimeError: in backward, where an input was changed in place before its copy was done: autograd says the same
            without offload.
    """
    if not features.OFFLOAD_CONTEXT.is_available():
        yield
        return
    chain = _Chain(engine, pinned_limit)
    with torch.autograd.graph.saved_tensors_hooks(chain.pack, lambda saved: saved.take()):
        yield
    chain.finish()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.chain: _Chain | None = None


_of_thread = _OfThread()


@contextmanager
def offload_where_asked(pinned_limit: int | None) -> Iterator[None]:
    """For one checkpoint: where ``save_on_cpu(pin_memory=True)`` would copy its input in turn with compute.

    The input moves as in :func:`offload_checkpoints`. What follows the last region is not seen: of the last three
    regions the inputs stay.
    """
    if not (saved_tensor_hooks.move_to_pinned_memory() and features.OFFLOAD_CONTEXT.is_available()):
        yield
        return
    chain = _of_thread.chain = _of_thread.chain or _Chain(engine, pinned_limit)
    with torch.autograd.graph.saved_tensors_hooks(chain.pack, lambda saved: saved.take()):
        yield


def comes_back_as_it_was(tensor: Tensor) -> bool:
    """What comes back is dense and plain, and compiled code relies on the strides that it has seen."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and keeps_layout(tensor)


class KeptValue:
    """A saved value that stays where it is.

    Without hooks, autograd saves a node's output without its way back to the node, which would keep both for ever, and
    refuses to run a backward over a value that was changed in place. With hooks, both are left to them.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor if tensor.is_leaf else tensor.detach()  # the same memory and version counter
        self._version = tensor._version

    def take(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(self._tensor.shape)} is at version {self._tensor._version}; expected version {self._version}"
            )
        return self._tensor


class SavedInput:
    """One region's input: on the device, on the host, or on its way. ``previous`` is the one before it in forward."""

    def __init__(self, tensor: Tensor, previous: SavedInput | None, copies: CopyEngine) -> None:
        self._copies = copies
        self._device = tensor.device
        self._version = tensor._version
        self._argument = weakref.ref(tensor)
        # Detached: an input that the region writes becomes an output of it, which would then keep itself.
        self._source: Tensor | None = tensor.detach()
        self._host: Tensor | None = None
        self._buffer: Tensor | None = None
        self._changed = False
        self._stays = False
        # Weak: a graph that is kept must not keep the inputs of others.
        self._previous = weakref.ref(previous) if previous is not None else None

    def stay_for(self, saved: Tensor, call: SavingCall) -> None:
        """Do not move, if the call that this is an argument of saves so large a value besides."""
        argument = self._argument()
        if argument is not None and argument.nbytes <= saved.nbytes and call.is_given(argument):
            self._stays = True

    def offload(self, pinned_limit: int | None) -> None:
        """Start the copy to the host. The source stays until :meth:`drop_source`."""
        if self._source is not None and self._host is None and not self._stays:
            self._note_change()
            self._host = self._copies.start_offload(self._source, pinned_limit)

    def drop_source(self, at_once: bool = True) -> bool:
        """The current stream waits for the copy, and the device memory may go; not ``at_once``: only if it has ended.

        Returns:
            Is it gone?
        """
        if self._host is not None and self._source is not None and (at_once or self._copies.has_ended(self._host)):
            self._copies.wait_offload(self._host)
            self._note_change()
            self._source = None
        return self._source is None

    def prefetch(self) -> None:
        """Start the copy back, once."""
        if self._host is not None and self._source is None and self._buffer is None:
            self._buffer = self._copies.start_reload(self._host, self._device)

    def take(self) -> Tensor:
        """The input, for backward; the one before it starts its way back."""
        if self._source is not None:
            self._note_change()
        if self._changed:
            raise RuntimeError(
                "the input of a checkpointed region was modified by an inplace operation after the region read it, "
                f"and before its copy to the host was done (it was at version {self._version})"
            )
        self.prefetch()
        result, self._buffer = self._source if self._buffer is None else self._buffer, None
        assert result is not None
        previous = self._previous() if self._previous is not None else None
        if previous is not None:
            previous.prefetch()
        self._copies.wait_reload(result)
        return result

    def _note_change(self) -> None:
        self._changed |= self._source is not None and self._source._version != self._version


class _Chain:
    """The inputs of one context in the order in which forward saves them."""

    def __init__(self, copies: CopyEngine, pinned_limit: int | None) -> None:
        self._copies = copies
        self._limit = pinned_limit
        self._last: weakref.ref[SavedInput] | None = None
        self._in_flight: deque[weakref.ref[SavedInput]] = deque()
        self._warned = False

    def pack(self, tensor: Tensor) -> SavedInput | KeptValue:
        call = checkpoint_calls.saving_call()
        if call is None:
            # Behind a region, such as the loss: its compute has hidden the copies that it found.
            self.finish()
            return KeptValue(tensor)
        last = self._last() if self._last is not None else None
        if not call.is_given(tensor):
            # A compiled graph that does not compute everything again is no checkpointed region.
            if last is not None:
                last.stay_for(tensor, call)
            return KeptValue(tensor)
        if not self._is_moved(tensor) or not self._has_copies(tensor.device):
            return KeptValue(tensor)
        saved = SavedInput(tensor, last, self._copies)
        self._last = weakref.ref(saved)
        if last is not None:  # it is not the last region's: that one stays
            if len(self._in_flight) == BUFFERS:
                self._drop_oldest()
            last.offload(self._limit)
            self._in_flight.append(weakref.ref(last))
        return saved

    def finish(self) -> None:
        while self._in_flight:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self._in_flight.popleft()()
        if oldest is not None:
            oldest.drop_source()

    def _has_copies(self, device: torch.device) -> bool:
        reason = why_no_copies(device)
        if reason is not None and not self._warned:
            self._warned = True
            warnings.warn(f"glue: checkpoint inputs stay on the device: {reason}", GlueWarning, stacklevel=3)
        return reason is None

    @staticmethod
    def _is_moved(tensor: Tensor) -> bool:
        return tensor.requires_grad and not tensor.is_leaf and tensor.numel() > 0 and comes_back_as_it_was(tensor)
