"""Tensor subclasses that hold no memory. What is private here is the same in torch 2.11 to 2.15, but for one part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from glue_compiler.compat.parts import ANY, Feature, Uses

DEFERRED = Feature(
    "deferral of logits",
    {
        "torch:Tensor._make_wrapper_subclass": ANY,
        "torch._functorch._aot_autograd.utils:maybe_to_fresh_input": Uses(("idx", "t", "meta")),
        "torch._guards:TracingContext.try_get": ANY,
        "torch._ops:OpOverload.has_kernel_for_dispatch_key": Uses(("self", "k")),
        "torch._subclasses.functional_tensor:FunctionalTensor": ANY,
        "torch.utils._python_dispatch:_disable_current_modes": ANY,
    },
)
"""Without it, logits are computed at once."""

WrapperT = TypeVar("WrapperT", bound=Tensor)

NO_TORCH_FUNCTION: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""As ``__torch_function__``: functions take the subclass as they take a tensor, and give no subclass back."""


def make(
    cls: type[WrapperT],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | torch.SymInt,
    dtype: torch.dtype,
    device: torch.device,
) -> WrapperT:
    """A tensor of this class, with a shape and no values."""
    tensor = Tensor._make_wrapper_subclass(
        cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=device, requires_grad=False
    )
    # A kernel that is given the tensor past the dispatcher must not run with its address, which is zero.
    if hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"):
        storage = Tensor.untyped_storage(tensor)
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, _NO_MEMORY)
    else:  # 2.11
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


_NO_MEMORY = (
    "deferred logits have no memory of their own, and something asked for its address. Pass on `logits + 0`, or "
    'compile with options={"logits": "kept"}.'
)


def is_copy_of_input() -> bool:
    """Does AOTAutograd clone an input that is written, for what reads it before (``maybe_to_fresh_input``)?"""
    from torch._functorch._aot_autograd.utils import maybe_to_fresh_input

    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not maybe_to_fresh_input.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def in_compile() -> bool:
    """Does Dynamo or AOTAutograd trace something in this thread?"""
    return torch._guards.TracingContext.try_get() is not None


def out_of_modes() -> AbstractContextManager[Any]:
    """Without the dispatch modes (fake tensors, tracing) that are active in this thread."""
    return torch.utils._python_dispatch._disable_current_modes()


def is_wrapper(tensor: Tensor) -> bool:
    """Is it of a subclass around other tensors, which compilers trace through?"""
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)


def counts_writes(operator: Any) -> bool:
    """Does autograd count this operator's writes for the tensors that it is given?

    Else it leaves that to the operators which do the work, as it does for ``_foreach`` ones and fused optimizers.
    """
    if not isinstance(operator, torch._ops.OpOverload):
        return True
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.ADInplaceOrView)


def is_functional(tensor: Tensor) -> bool:
    """Is it of AOTAutograd's trace?"""
    return isinstance(tensor, torch._subclasses.functional_tensor.FunctionalTensor)
