"""What operators give for deferred logits without computing them, or without keeping what they compute."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from glue_compiler.deferred.head import Elementwise
from glue_compiler.deferred.values import Geometry, Given, Memory, View

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class Kind(enum.IntEnum):
    """What an operator does to the memory of an operand, as its schema says, from least to most.

    The kind of an operator is the maximum over its operands.
    """

    READ = enum.auto()
    VIEW = enum.auto()
    WRITE = enum.auto()
    RESHAPE_IN_PLACE = enum.auto()


@dataclass(frozen=True)
class Uses:
    """By argument, in the schema's order; ``kind`` is that of the operator, and of arguments that are not in it."""

    kind: Kind
    arguments: tuple[tuple[str, Kind], ...] = ()

    def of_argument(self, index: int) -> Kind:
        return self.arguments[index][1] if index < len(self.arguments) else self.kind

    def of_keyword(self, name: str) -> Kind:
        return dict(self.arguments).get(name, self.kind)


@functools.cache
def uses(func: Any) -> Uses:
    if not isinstance(func, torch._ops.OpOverload):
        return Uses(Kind.WRITE)  # a higher-order operator may do anything
    arguments = tuple((argument.name, _use(argument.alias_info)) for argument in func._schema.arguments)
    if func is aten._unsafe_view.default:  # a view that is not called one
        arguments = (("self", Kind.VIEW), *arguments[1:])
    if torch.Tag.inplace_view in func.tags:
        # What another tensor is set to is its memory from then on, which no schema says.
        shares = tuple((name, Kind.VIEW if kind is Kind.READ else kind) for name, kind in arguments)
        return Uses(Kind.RESHAPE_IN_PLACE, shares)
    return Uses(max((kind for _, kind in arguments), default=Kind.READ), arguments)


def _use(alias: Any) -> Kind:
    if alias is None:
        return Kind.READ
    return Kind.WRITE if alias.is_write else Kind.VIEW


def apply(view: View, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """What ``func(logits, *args, **kwargs)`` gives: a :class:`View` for logits that stay deferred, a list of them, or
    plain results; NotImplemented if it takes all values.
    """
    rule = _RULES.get(func) or (_view if uses(func).kind is Kind.VIEW else None)
    if rule is None or isinstance(view, Given):
        return NotImplemented
    with view.memory.lock:
        if view.memory.exists:
            return NotImplemented
        return rule(view, func, args, kwargs)


def _view(view: View, func: Any, args: Args, kwargs: Kwargs) -> Any:
    shadows = func(view.shadow(), *args, **kwargs)
    if isinstance(shadows, Tensor):
        return _part(view, shadows)
    parts = [_part(view, shadow) for shadow in shadows]
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


def _part(view: View, shadow: Tensor) -> Any:
    memory, geometry = view.memory, Geometry.of(shadow)
    if shadow.dtype != memory.dtype:
        return NotImplemented
    if geometry == view.geometry:
        return view  # the same object: what is computed for one of the two is there for both
    rows = geometry.in_rows(memory.words)
    return NotImplemented if rows is None else View(memory, geometry, rows)


def _copy(view: View, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``clone`` and ``_to_copy``: logits of their own, of the same rows."""
    memory = view.memory
    options = dict(kwargs)
    dtype = options.get("dtype") or memory.dtype
    if view.is_computed or not dtype.is_floating_point or options.pop("device", None) not in (None, memory.device):
        return NotImplemented
    if options.pop("pin_memory", None) or options.pop("layout", None) not in (None, torch.strided):
        return NotImplemented
    if not func(view.shadow(), *args, **options).is_contiguous():
        return NotImplemented
    head = memory.head
    if dtype != memory.dtype:
        head = replace(head, steps=(*head.steps, Elementwise("cast", dtype=dtype)))
    return View.whole(memory.derived(head, view.rows()))


def _pick(view: View, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``index`` and ``index_select`` of rows: logits of their own."""
    memory, lead = view.memory, len(view.geometry.size) - 1
    if view.is_computed or not memory.order.is_here():
        return NotImplemented
    if func is aten.index_select.default:
        dim = args[0] + lead + 1 if args[0] < 0 else args[0]
        is_of_rows = 0 <= dim < lead
        args = (dim, *args[1:])
        indices = list(args[1:])
    else:
        indices = args[0]
        is_of_rows = sum(map(_indexed_dimensions, indices)) <= lead
    if not is_of_rows or any(type(index) not in (Tensor, type(None)) for index in indices):
        return NotImplemented
    memory.check(only_rows=True)
    with torch.inference_mode(False):
        rows = tuple(func(row, *args, **kwargs) for row in view.rows())
    return View.whole(memory.derived(memory.head, rows, are_copies=True))


def _indexed_dimensions(index: Tensor | None) -> int:
    return index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1


def _reduce(view: View, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The largest or smallest of each row."""
    names = [argument.name for argument in func._schema.arguments[1:]]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    dim = arguments.pop("dim", -1 if func is aten.topk.default else None)
    last = len(view.geometry.size) - 1
    if dim not in (-1, last) or last == 0:
        return NotImplemented

    def reduce(logits: Tensor) -> tuple[Tensor, ...]:
        result = func(logits, dim=-1, **arguments)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    results = view.by_chunks(reduce)
    if results is None:
        return NotImplemented
    return tuple(results) if len(results) > 1 else results[0]


def _new(view: View, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``new_zeros`` and its like read no number."""
    return func(_empty(view.memory), *args, **kwargs)


def _like(view: View, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if kwargs.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    if not torch.empty_like(view.shadow()).is_contiguous():
        return NotImplemented
    like = _empty(view.memory).expand(view.geometry.size)
    return func(like, *args, **{**kwargs, "memory_format": torch.contiguous_format})


def _empty(memory: Memory) -> Tensor:
    return torch.empty((), dtype=memory.dtype, device=memory.device)


def _nothing(view: View, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``record_stream``: there is no memory yet, and what there will be knows its streams."""
    return None


_Rule = Callable[[View, Any, Args, Kwargs], Any]
_RULES: dict[Any, _Rule] = {
    **dict.fromkeys((aten.clone.default, aten._to_copy.default), _copy),
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default), _pick),
    **dict.fromkeys(
        (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.topk.default),
        _reduce,
    ),
    **dict.fromkeys(
        (
            aten.new_empty.default,
            aten.new_empty_strided.default,
            aten.new_full.default,
            aten.new_ones.default,
            aten.new_zeros.default,
        ),
        _new,
    ),
    **dict.fromkeys(
        (aten.empty_like.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default), _like
    ),
    aten.record_stream.default: _nothing,
}
