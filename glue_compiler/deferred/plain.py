"""What reaches a tensor past the dispatcher, and so is given one that holds its numbers."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from glue_compiler.compat import wrapper_tensors
from glue_compiler.deferred.values import View
from glue_compiler.errors import GlueDeferredError


class _Values(torch.autograd.Function):
    """The same numbers in a plain tensor that shares their memory."""

    @staticmethod
    def forward(ctx: Any, tensor: PlainMethods) -> Tensor:
        return tensor._deferred.shared()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class PlainMethods(Tensor):
    """The methods of a deferred tensor that are no operators."""

    _deferred: View

    def plain(self) -> Tensor:
        """A plain tensor with the same values, memory and history."""
        if self.is_leaf:
            return self._deferred.shared().requires_grad_(self.requires_grad)
        with torch.enable_grad():  # a tensor with a history keeps it where none is recorded
            return _Values.apply(self)

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain().__array__(*args, **kwargs)

    def data_ptr(self) -> int:
        return self._deferred.shared().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        if wrapper_tensors.in_compile():
            return super().untyped_storage()  # to a tracer, the memory of the values is the inner tensor's
        return self._deferred.shared().untyped_storage()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain().__dlpack__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if wrapper_tensors.in_compile():
            return _same, (self._deferred.values_to_trace(),)  # for the keys of torch's caches
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.plain().__deepcopy__(memo)

    def __repr__(self, **how: Any) -> str:  # type: ignore[override]
        try:
            plain = self.plain()
        except GlueDeferredError as error:  # debuggers and tracebacks show tensors, too
            return f"{type(self).__name__}(size={tuple(self.shape)}, dtype={self.dtype}, no values: {error})"
        return plain.__repr__(**how)

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else self.plain().__format__(spec)

    @property
    def data(self) -> Tensor:
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        raise GlueDeferredError(
            "deferred logits cannot be given other data. Write into them (logits.copy_(...)), or compile with "
            'options={"logits": "kept"}.'
        )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def reduce_for_processes(tensor: PlainMethods) -> Any:
    return reduce_tensor(tensor.plain())


def send_between_processes(cls: type[PlainMethods]) -> None:
    """As ``torch.multiprocessing`` does for tensors: their memory is shared."""
    ForkingPickler.register(cls, reduce_for_processes)
