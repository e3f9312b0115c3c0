"""What deferred logits are computed from, and whether it is still what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from glue_compiler.errors import GlueDeferredError

Role = Literal["hidden state", "weight", "bias"]

_SAMPLE = 256
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watched:
    """A tensor without its history, and its version when the logits were deferred.

    A weight is sampled, too: memory is also written past the version counter (``.data``, FSDP's gathered parameters).
    Of such writes those that leave most of a weight alone are not noticed.
    """

    def __init__(self, tensor: Tensor, role: Role) -> None:
        self.tensor = tensor.detach()  # shares the version counter
        self._role = role
        self._version = tensor._version
        self._sample = _sample(self.tensor) if role == "weight" else None

    @property
    def is_row(self) -> bool:
        return self._role == "hidden state"

    def check(self) -> None:
        """Raises if it is not what it was."""
        if self.tensor._version != self._version:
            raise self._error("has been written since, in place")
        # Sharded training frees gathered parameters by taking their memory.
        if self.tensor.numel() and self.tensor.untyped_storage().nbytes() == 0:
            raise self._error("is no longer in memory")
        if self._sample is not None:
            now = _sample(self.tensor)
            bits = _BITS[self.tensor.element_size()]
            if now is None or not torch.equal(now.view(bits), self._sample.view(bits)):
                raise self._error("has been written since, past its version counter")

    def _error(self, what: str) -> GlueDeferredError:
        return GlueDeferredError(
            f"these logits were to be computed when somebody reads them, and a {self._role} that they come from, "
            f"{list(self.tensor.shape)}, {what}. Compute with the logits before that, as before optimizer.step() "
            "(clones, casts and picked rows wait as the logits do; `logits + 0` is computed at once), or compile "
            'with options={"logits": "kept"}, which computes them with the loss.'
        )


def watch(rows: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Watched, ...]:
    named: tuple[tuple[Role, Sequence[Tensor]], ...] = (("hidden state", rows), ("weight", weights), ("bias", biases))
    return tuple(Watched(tensor, role) for role, tensors in named for tensor in tensors)


def _sample(tensor: Tensor) -> Tensor | None:
    """A copy of some of its numbers, from all over its memory."""
    count = min(_SAMPLE, tensor.numel())
    if count == 0 or not (tensor.is_contiguous() or tensor.mT.is_contiguous()):
        return None
    step = tensor.numel() // count
    step -= step > 1 and step % 2 == 0  # odd: not all from one column
    return tensor.as_strided((count,), (step,), tensor.storage_offset()).clone()
