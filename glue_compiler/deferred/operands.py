"""What deferred logits are computed from, and whether it is still what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from glue_compiler.deferred.optimizer_steps import STEPS
from glue_compiler.deferred.streams import StreamOrder
from glue_compiler.errors import GlueDeferredError
from glue_compiler.fx.values import keeps_layout

Role = Literal["hidden state", "weight", "bias"]

_SAMPLE = 256
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watched:
    """A tensor without its history, its version when the logits were deferred, and a sample of its numbers.

    Memory is also written past the version counter (``.data``, numpy, FSDP's gathered parameters). The sample notices
    such writes unless they leave most of the tensor alone.
    """

    def __init__(self, tensor: Tensor, role: Role, order: StreamOrder) -> None:
        self._operand = tensor.detach()  # shares the version counter
        self._copy: Tensor | None = None
        self._role = role
        self._order = order
        self._version = tensor._version
        self._is_dense = keeps_layout(tensor)
        self._sample = self._sampled()
        if role != "hidden state":
            STEPS.will_be_read(self)

    @property
    def tensor(self) -> Tensor:
        """To compute with, once :meth:`check` has passed."""
        return self._operand if self._copy is None else self._copy

    @property
    def operand(self) -> Tensor:
        return self._operand

    @property
    def is_row(self) -> bool:
        return self._role == "hidden state"

    def can_be_copied(self) -> bool:
        return self._copy is None and self._changed() is None and self._order.is_here()

    @property
    def is_copied(self) -> bool:
        return self._copy is not None

    def use_copy(self, copy: Tensor | None) -> None:
        """Of the operand as it is now, made on the current stream, on any device; None: the operand again."""
        self._copy = copy

    def check(self) -> None:
        """Raises if it is not what it was."""
        if self._copy is not None:
            STEPS.were_read_late = True
            self._copy = self._copy.to(self._operand.device, non_blocking=True)
        elif changed := self._changed():
            raise self._error(changed)
        bits = _BITS[self._operand.element_size()]
        if not torch.equal(self._sampled().view(bits), self._sample.view(bits)):
            raise self._error("has been written since, past its version counter")

    def _changed(self) -> str | None:
        if self._operand._version != self._version:
            return "has been written since, in place"
        # Sharded training frees gathered parameters by taking their memory.
        if self._operand.numel() and self._operand.untyped_storage().nbytes() == 0:
            return "is no longer in memory"
        return None

    def _sampled(self) -> Tensor:
        """A copy of some of its numbers, from all over it."""
        tensor = self.tensor
        count = min(_SAMPLE, tensor.numel())
        step = tensor.numel() // max(count, 1)
        step -= step > 1 and step % 2 == 0  # odd: not all from one column
        if self._is_dense:
            return tensor.as_strided((count,), (step,), tensor.storage_offset()).clone()
        places = torch.arange(count, device=tensor.device) * step
        return tensor[torch.unravel_index(places, tensor.shape)]

    def _error(self, what: str) -> GlueDeferredError:
        return GlueDeferredError(
            f"these logits were to be computed when somebody reads them, and a {self._role} that they come from, "
            f"{list(self._operand.shape)}, {what}. Compute with the logits before that (clones, casts and picked rows "
            'wait as the logits do; `logits + 0` is computed at once), or compile with options={"logits": "kept"}, '
            "which computes them with the loss."
        )


def watch(
    rows: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], order: StreamOrder
) -> tuple[Watched, ...]:
    named: tuple[tuple[Role, Sequence[Tensor]], ...] = (("hidden state", rows), ("weight", weights), ("bias", biases))
    return tuple(Watched(tensor, role, order) for role, tensors in named for tensor in tensors)
