"""A tensor whose values are computed when somebody reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from glue_compiler.compat import runtime, wrapper_tensors
from glue_compiler.deferred import rules
from glue_compiler.deferred.head import Head
from glue_compiler.deferred.operands import watch
from glue_compiler.deferred.plain import PlainMethods, send_between_processes
from glue_compiler.deferred.streams import StreamOrder
from glue_compiler.deferred.values import Geometry, Given, Memory, View
from glue_compiler.errors import GlueDeferredError


def defer(head: Head, rows: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
    """``head.logits(rows, weights, biases)``, computed when somebody reads it; at once where that cannot be late."""
    operands = (*rows, *weights, *biases)
    if (
        not wrapper_tensors.DEFERRED.is_available()
        or torch.is_inference_mode_enabled()
        or runtime.in_transform()
        or runtime.is_capturing()  # each replay has to make them anew
        or any(type(t) not in _PLAIN or t.is_inference() for t in operands)  # no version, or one of another's
    ):
        return head.logits(rows, weights, biases)
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _Defer.apply(head, len(rows), *operands)
    return _root(head, rows, weights, biases)


_PLAIN = (Tensor, torch.nn.Parameter)


def _root(head: Head, rows: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]) -> DeferredTensor:
    order = StreamOrder(rows[0].device)
    watched = watch(rows, weights, biases, order)
    return _tensor_of(View.whole(Memory(head, [each.tensor for each in watched if each.is_row], watched, order)))


class _Defer(torch.autograd.Function):
    """Logits from their operands: to autograd, one node, whether somebody reads them or not."""

    @staticmethod
    def forward(ctx: Any, head: Head, terms: int, *operands: Tensor) -> Tensor:
        ctx.head, ctx.terms = head, terms
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        return _root(head, operands[:terms], operands[terms : 2 * terms], operands[2 * terms :])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        operands, terms = ctx.saved_tensors, ctx.terms
        split = operands[:terms], operands[terms : 2 * terms], operands[2 * terms :]
        return None, None, *ctx.head.gradients(gradient, *split, ctx.needs_input_grad[2:])


class DeferredTensor(PlainMethods):
    """Looks like logits from the start; :class:`~glue_compiler.deferred.values.View` says what it stands for.

    Operators that pick rows, cast, copy or detach give deferred tensors. All others compute the values; views give
    tensors of this class all the same, others plain ones. What does not pass the dispatcher (``numpy``, pickling,
    memory addresses) acts on a plain tensor.
    """

    __torch_function__ = wrapper_tensors.NO_TORCH_FUNCTION

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], DeferredTensor):
            result = rules.apply(args[0]._deferred, func, args[1:], kwargs)
            if isinstance(result, (View, list)):
                with _as_views_are(func, args[0]):
                    return _tensor_of(result) if isinstance(result, View) else [_tensor_of(each) for each in result]
            if result is not NotImplemented:
                return result
        return _compute(func, args, kwargs)

    # torch.compile traces a tensor of this class around its values, which are computed before that.

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_to_trace"], None

    @property
    def values_to_trace(self) -> Tensor:
        return self._deferred.values_to_trace()

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], context: None, size: Any, stride: Any) -> DeferredTensor:
        return _around(inner["values_to_trace"])

    def _stable_hash_for_caching(self) -> str:
        inner = self.values_to_trace
        metadata = inner.size(), inner.stride(), inner.storage_offset(), inner.dtype, inner.device, self.requires_grad
        return f"{type(self).__qualname__} {metadata}"


send_between_processes(DeferredTensor)


def _tensor_of(view: View) -> DeferredTensor:
    memory, it = view.memory, view.geometry
    tensor = wrapper_tensors.make(DeferredTensor, it.size, it.stride, it.offset, memory.dtype, memory.device)
    tensor._deferred = view
    return tensor


def _as_views_are(func: Any, tensor: Tensor) -> AbstractContextManager[Any]:
    """A view made in inference mode is an inference tensor only if what it looks at is one."""
    is_normal = rules.uses(func).kind is rules.Kind.VIEW and not tensor.is_inference()
    return torch.inference_mode(False) if is_normal and torch.is_inference_mode_enabled() else nullcontext()


def _around(values: Tensor) -> DeferredTensor:
    size, stride, offset = values.size(), values.stride(), values.storage_offset()
    tensor = wrapper_tensors.make(DeferredTensor, size, stride, offset, values.dtype, values.device)
    tensor._deferred = Given(values)
    return tensor


def _compute(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func`` on the values."""
    uses = rules.uses(func)
    written: dict[int, tuple[Tensor, DeferredTensor]] = {}
    plain_args = [_plain(value, uses.of_argument(index), written) for index, value in enumerate(args)]
    plain_kwargs = {name: _plain(value, uses.of_keyword(name), written) for name, value in kwargs.items()}
    if written and uses.kind is rules.Kind.RESHAPE_IN_PLACE:
        raise _other_shape(func)
    result = func(*plain_args, **plain_kwargs)
    if uses.kind is rules.Kind.VIEW and args and isinstance(args[0], DeferredTensor):
        # To autograd it is a view of a tensor of this class, and tracers expect one of this class, too.
        view = args[0]._deferred
        with _as_views_are(func, args[0]):
            return _seen(view, result) if isinstance(result, Tensor) else [_seen(view, each) for each in result]
    if func is torch.ops.aten.clone.default and wrapper_tensors.is_copy_of_input():
        # AOTAutograd takes it to have as many parts as the input.
        return _around(result)
    if not written:
        return result
    for values, tensor in written.values():
        if values.shape != tensor.shape:  # out= of another shape
            raise _other_shape(func)
        if not wrapper_tensors.counts_writes(func):
            torch.autograd.graph.increment_version(tensor)
    # An operator that writes returns what it wrote to.
    if isinstance(result, (list, tuple)):
        return type(result)(written[id(each)][1] if id(each) in written else each for each in result)
    return written[id(result)][1] if id(result) in written else result


def _plain(value: Any, use: rules.Kind, written: dict[int, tuple[Tensor, DeferredTensor]]) -> Any:
    if isinstance(value, DeferredTensor):
        values = value._deferred.values() if use is rules.Kind.READ else value._deferred.shared()
        if use is rules.Kind.WRITE:
            written[id(values)] = values, value
        return values
    if type(value) in (list, tuple):
        return type(value)(_plain(item, use, written) for item in value)
    if type(value) is dict:
        return {name: _plain(item, use, written) for name, item in value.items()}
    return value


def _seen(view: View, values: Tensor) -> Tensor:
    """``values``, a view of those of ``view``, as a deferred tensor; plain where there is no such tensor."""
    if isinstance(view, Given):
        return _around(values) if view.makes_views else values
    same = values.dtype == view.memory.dtype and values.layout == torch.strided and not values.is_conj()
    return _tensor_of(View(view.memory, Geometry.of(values))) if same else values


def _other_shape(func: Any) -> GlueDeferredError:
    return GlueDeferredError(
        f"{func} would change the shape of deferred logits in place. Use the operator that returns a new tensor or a "
        'view, or compile with options={"logits": "kept"}.'
    )
