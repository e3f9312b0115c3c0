"""Layers that keep what backward needs on the host: copies run beside the compute of the layers around them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from glue_compiler.compat import storages
from glue_compiler.fx.values import keeps_layout
from glue_compiler.memory.layer_roles import Choice, Role
from glue_compiler.memory.offload_context import KeptValue, SavedInput
from glue_compiler.ops.copy_engine import CopyEngine, engine

LEAST_BYTES = 2**20
"""Of a value that is moved: less takes no time to copy and no memory to keep."""


class MovedCall:
    """What one call of a layer's compiled code saves for backward.

    Args:
        inputs: of the call. What shares memory with them stays, as others hold it.
    """

    def __init__(self, inputs: Sequence[Any], copies: CopyEngine, least: int) -> None:
        self._inputs = {storages.identity(value) for value in inputs if isinstance(value, Tensor)}
        self._copies, self._least = copies, least
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
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and keeps_layout(tensor)
        return is_plain and tensor.nbytes >= self._least and storages.identity(tensor) not in self._inputs


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

    def run(self, call: Callable[..., Any], inputs: Sequence[Any], layer: int, role: Role) -> Any:
        """``call(*inputs)`` of ``layer``; what was moved before leaves when ``role`` says so at the latest."""
        moves = role.choice is Choice.MOVE
        leaving, moved_calls = self._of_thread.leaving, self._of_thread.moved
        waits = any(each == role.leaves for each, _ in leaving)
        while leaving and leaving[0][1].leave(at_once=waits):
            left, _ = leaving.popleft()
            waits &= left != role.leaves
        if not moves:
            results = call(*inputs)
        else:
            moved_calls[layer] = moved = MovedCall(inputs, self._copies, self._least)
            leaving.append((layer, moved))
            with torch.autograd.graph.saved_tensors_hooks(moved.pack, lambda value: value.take()):
                results = call(*inputs)
        returns = None if role.returns is None else moved_calls.get(role.returns)
        node = next((each.grad_fn for each in results if getattr(each, "grad_fn", None) is not None), None)
        if returns is not None and node is not None:
            node.register_prehook(lambda _: returns.come_back())
        return results
