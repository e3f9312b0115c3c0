"""Methods that bypass the dispatcher (numpy, pickling, addresses): they act on a plain tensor with the values."""

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
        return self._deferred.storage()

    def share_memory_(self) -> Tensor:
        self._deferred.shared().share_memory_()
        return self

    def is_shared(self) -> bool:
        return self._deferred.shared().is_shared()

    def as_subclass(self, cls: Any) -> Any:
        return self.plain().as_subclass(cls)

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
        view = value._deferred if isinstance(value, PlainMethods) else self._deferred.holding(value.detach())
        looks = wrapper_tensors.make(
            type(self), value.size(), value.stride(), value.storage_offset(), value.dtype, value.device
        )
        Tensor.data.__set__(self, looks)  # type: ignore[attr-defined]
        self._deferred = view

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """``nn.Parameter(logits.detach())`` has made this tensor, and nobody else has it yet."""
        torch.utils.swap_tensors(self, torch.nn.Parameter(self.plain().detach(), self.requires_grad))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def reduce_for_processes(tensor: PlainMethods) -> Any:
    return reduce_tensor(tensor.plain())


def send_between_processes(cls: type[PlainMethods]) -> None:
    """As ``torch.multiprocessing`` does for tensors: their memory is shared."""
    ForkingPickler.register(cls, reduce_for_processes)
