"""A tensor whose values are computed when somebody reads them."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glue_compiler.compat import runtime, wrapper_tensors
from glue_compiler.deferred.head import Head, Step
from glue_compiler.deferred.operands import watch
from glue_compiler.deferred.streams import StreamOrder
from glue_compiler.deferred.values import Geometry, Memory, View
from glue_compiler.errors import GlueDeferredError

aten = torch.ops.aten


def defer(head: Head, rows: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
    """``head.logits(rows, weights, biases)``, computed when somebody reads it; at once where that cannot be late."""
    operands = (*rows, *weights, *biases)
    if (
        torch.is_inference_mode_enabled()
        or runtime.in_transform()
        or any(type(t) not in _PLAIN or t.is_inference() for t in operands)  # no version, or one of another's
    ):
        return head.logits(rows, weights, biases)
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _Defer.apply(head, len(rows), *operands)
    return _root(head, rows, weights, biases)


_PLAIN = (Tensor, torch.nn.Parameter)


def _root(head: Head, rows: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]) -> DeferredTensor:
    watched = watch(rows, weights, biases)
    plain = [each.tensor for each in watched]
    count = len(rows)
    memory = Memory(
        head, plain[:count], plain[count : 2 * count], plain[2 * count :], watched, StreamOrder(rows[0].device)
    )
    return _tensor_of(View.whole(memory))


class _Defer(torch.autograd.Function):
    """Logits from their operands: to autograd, one node, whether somebody reads them or not."""

    @staticmethod
    def forward(ctx: Any, head: Head, terms: int, *operands: Tensor) -> Tensor:
        ctx.head, ctx.terms = head, terms
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        return _root(head, operands[:terms], operands[terms : 2 * terms], operands[2 * terms :])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # type: ignore[override]
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        operands, terms = ctx.saved_tensors, ctx.terms
        split = operands[:terms], operands[terms : 2 * terms], operands[2 * terms :]
        return None, None, *ctx.head.gradients(gradient, *split, ctx.needs_input_grad[2:])


class DeferredTensor(Tensor):
    """Looks like logits from the start; :class:`~glue_compiler.deferred.values.View` says what it stands for.

    Operators that pick rows, cast, copy or detach give deferred tensors, all others compute the values and give plain
    ones. What does not pass the dispatcher (``numpy``, pickling, memory addresses) acts on a plain tensor.
    """

    _deferred: View

    __torch_function__ = wrapper_tensors.NO_TORCH_FUNCTION

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = _stay_deferred(func, args, kwargs)
        return _compute(func, args, kwargs) if result is NotImplemented else result


def _tensor_of(view: View) -> DeferredTensor:
    memory, it = view.memory, view.geometry
    tensor = wrapper_tensors.make(DeferredTensor, it.size, it.stride, it.offset, memory.dtype, memory.device)
    tensor._deferred = view
    return tensor


class _Kind(enum.Enum):
    """What an operator does to memory, as its schema says."""

    READ = enum.auto()
    VIEW = enum.auto()
    WRITE = enum.auto()
    RESHAPE_IN_PLACE = enum.auto()


@functools.cache
def _kind(func: Any) -> _Kind:
    if not isinstance(func, torch._ops.OpOverload):
        return _Kind.WRITE  # a higher-order operator may do anything
    infos = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    if torch.Tag.inplace_view in func.tags:
        return _Kind.RESHAPE_IN_PLACE
    if any(info.is_write for info in infos):
        return _Kind.WRITE
    return _Kind.VIEW if infos or func is aten._unsafe_view.default else _Kind.READ


def _stay_deferred(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result, if it can be given without the values; else NotImplemented."""
    if not args or not isinstance(args[0], DeferredTensor) or args[0]._deferred.memory.exists:
        return NotImplemented
    view = args[0]._deferred
    if _kind(func) is _Kind.VIEW:
        return _view(view, func, args[1:], kwargs)
    rule = _RULES.get(func)
    return NotImplemented if rule is None else rule(view, func, args[1:], kwargs)


def _view(view: View, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    shadows = func(view.shadow(), *args, **kwargs)
    several = isinstance(shadows, (list, tuple))
    views = [_part(view, shadow) for shadow in (shadows if several else (shadows,))]
    if any(each is None for each in views):
        return NotImplemented
    tensors = [_tensor_of(each) for each in views if each is not None]
    return tensors if several else tensors[0]


def _part(view: View, shadow: Tensor) -> View | None:
    geometry, memory = Geometry.of(shadow), view.memory
    if shadow.dtype != memory.dtype:
        return None
    if geometry == view.geometry:
        return view  # values that one of the two has computed are there for both
    rows = geometry.in_rows(memory.words)
    return None if rows is None else View(memory, geometry, rows)


def _copy(view: View, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``clone`` and ``_to_copy``: logits of their own, of the same rows."""
    memory = view.memory
    kwargs = dict(kwargs)
    dtype = kwargs.get("dtype") or memory.dtype
    if view.is_computed or not dtype.is_floating_point or kwargs.pop("device", None) not in (None, memory.device):
        return NotImplemented
    if kwargs.pop("pin_memory", None) or kwargs.pop("layout", None) not in (None, torch.strided):
        return NotImplemented
    shadow = func(view.shadow(), *args, **kwargs)
    if not shadow.is_contiguous():
        return NotImplemented
    head = memory.head
    if dtype != memory.dtype:
        head = Head(head.terms, (*head.steps, Step("cast", dtype=dtype)))
    return _tensor_of(View.whole(memory.derived(head, view.rows())))


_Rule = Callable[[View, Any, tuple[Any, ...], Mapping[str, Any]], Any]
_RULES: dict[Any, _Rule] = {aten.clone.default: _copy, aten._to_copy.default: _copy}


def _compute(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func`` on the values."""
    kind = _kind(func)
    if kind is _Kind.RESHAPE_IN_PLACE:
        raise GlueDeferredError(
            f"{func} would change the shape of deferred logits in place. Use the operator that returns a view, "
            'or compile with options={"logits": "kept"}.'
        )
    shares = kind is not _Kind.READ
    given: dict[int, DeferredTensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, DeferredTensor):
            values = value._deferred.shared() if shares else value._deferred.values()
            given[id(values)] = value
            return values
        if isinstance(value, (list, tuple)):
            return type(value)(plain(item) for item in value)
        return value

    plain_args, plain_kwargs = plain(args), {name: plain(value) for name, value in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    if kind is not _Kind.WRITE:
        return result
    # An operator that writes returns what it wrote to.
    if isinstance(result, (list, tuple)):
        return type(result)(given.get(id(each), each) for each in result)
    return given.get(id(result), result)
