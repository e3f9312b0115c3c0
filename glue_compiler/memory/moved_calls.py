"""Layers that keep what backward needs, or their input, on the host: copies run beside the compute of others."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from glue_compiler.compat import storages
from glue_compiler.memory.layer_roles import Choice, Role
from glue_compiler.memory.offload_context import KeptValue, SavedInput, comes_back_as_it_was
from glue_compiler.ops.copy_engine import CopyEngine, engine

LEAST_BYTES = 2**20
"""Of a value that is moved: less takes no time to copy and no memory to keep."""


class MovedCall:
    """What one call of a layer's compiled code saves for backward.

    Args:
        inputs: of the call. What shares memory with them stays, as others hold it.
        own: one of them that moves.
        values: does what the call makes move?
    """

    def __init__(self, inputs: Sequence[Any], own: Tensor | None, values: bool, copies: CopyEngine, least: int) -> None:
        self._inputs = {storages.identity(value) for value in inputs if isinstance(value, Tensor)}
        self._own = None if own is None else storages.identity(own)
        self._of_values, self._copies, self._least = values, copies, least
        # Weak: a graph that is dropped drops what it has saved.
        self._values: list[weakref.ref[SavedInput]] = []

    def pack(self, tensor: Tensor) -> SavedInput | KeptValue:
        if not self._moves(tensor):
            return KeptValue(tensor)
        value = SavedInput(tensor, None, self._copies)
        value.offload(None)
        self._values.append(weakref.ref(value))
        return value

    def leave(self, at_once: bool) -> bool:
        """Free the device's memory of what has been copied, or, ``at_once``, of all: compute waits for the copies."""
        left = [value.drop_source(at_once) for value in self._alive()]
        return all(left)

    def come_back(self) -> None:
        for value in self._alive():
            value.prefetch()

    def _alive(self) -> list[SavedInput]:
        return [value for each in self._values if (value := each()) is not None]

    def _moves(self, tensor: Tensor) -> bool:
        if not comes_back_as_it_was(tensor) or tensor.nbytes < self._least:
            return False
        memory = storages.identity(tensor)
        return memory == self._own or (self._of_values and memory not in self._inputs)


class _OfThread(threading.local):
    """Threads have forwards, and streams, of their own.

    Attributes:
        leaving: what still lies on the device, with its layer.
        moved: layer → its latest call that was moved.
    """

    def __init__(self) -> None:
        self.leaving: deque[tuple[int, MovedCall]] = deque()
        self.moved: dict[int, MovedCall] = {}


class Mover:
    """Runs the calls of a model's layers, one after the other, and moves what some of them save."""

    def __init__(self, copies: CopyEngine = engine, least: int = LEAST_BYTES) -> None:
        self._copies, self._least = copies, least
        self._of_thread = _OfThread()

    def bytes_of(self, value: Tensor) -> int:
        """What is free when ``value``, a layer's input, lies on the host; 0: it has to stay."""
        moves = not value.is_leaf and comes_back_as_it_was(value) and value.nbytes >= self._least
        return value.nbytes if moves else 0

    def run(
        self, call: Callable[..., Any], inputs: Sequence[Any], layer: int, role: Role, own: Tensor | None = None
    ) -> Any:
        """``call(*inputs)`` of ``layer``; what was moved before leaves when ``role`` says so at the latest.

        Args:
            own: the input that moves if ``role`` says so; None: it has to stay.
        """
        values = role.choice is Choice.MOVE
        own = own if role.moves_input else None
        leaving, moved_calls = self._of_thread.leaving, self._of_thread.moved
        waits = any(each == role.leaves for each, _ in leaving)
        while leaving and leaving[0][1].leave(at_once=waits):
            left, _ = leaving.popleft()
            waits &= left != role.leaves
        if not values and own is None:
            results = call(*inputs)
        else:
            moved_calls[layer] = moved = MovedCall(inputs, own, values, self._copies, self._least)
            leaving.append((layer, moved))
            with torch.autograd.graph.saved_tensors_hooks(moved.pack, lambda value: value.take()):
                results = call(*inputs)
        returns = [moved_calls[each] for each in role.returns if each in moved_calls]
        node = next((each.grad_fn for each in results if getattr(each, "grad_fn", None) is not None), None)
        if returns and node is not None:
            node.register_prehook(partial(_come_back, returns))
        return results


def _come_back(moved: Sequence[MovedCall], _: Any) -> None:
    for each in moved:
        each.come_back()
