"""What a captured call does: the operators that it dispatches, each with its arguments bound by its schema.

A record names the call's operands by position, so that one record serves every call that is alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from glue_compiler.compat import symbols
from glue_compiler.fx.values import (
    StorageKey,
    Symbolic,
    expression,
    expressions,
    is_plain,
    leaves,
    storage_of,
    tensors_in,
)


@dataclass(frozen=True)
class Meta:
    """What is known of a tensor before it is computed; sizes and strides are ints or sympy expressions."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Given:
    """The tensor at ``position`` among the tensors that the call is given."""

    position: int


@dataclass(frozen=True)
class Made:
    """Result ``result`` of operator ``step`` of the record."""

    step: int
    result: int = 0


@dataclass(frozen=True)
class Unknown:
    """A tensor that came from neither, such as a constant of more than one element, or one written through a view."""


@dataclass(frozen=True)
class RecordedOperator:
    """One operator.

    Attributes:
        overload: the operator's overload, such as ``aten.add.Tensor``.
        arguments: by the names of its schema, absent ones with their defaults. Tensors as references, symbolic numbers
            as sympy expressions, tensors of one known element as Python numbers.
        results: flattened: :class:`Meta` of tensors, other values as they are in ``arguments``.
        memory: for each result the position of the operand whose memory it lies in, -1 for memory of the call's own.
        written: names of the arguments that it writes.
    """

    overload: Any
    arguments: Mapping[str, Any]
    results: tuple[Any, ...]
    memory: tuple[int, ...]
    written: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallRecord:
    """``operators`` in order; ``result``: what the call gives, flattened, as references and other values."""

    operators: tuple[RecordedOperator, ...]
    result: tuple[Any, ...]

    def meta_at(self, reference: Any, given: Sequence[torch.Tensor]) -> Any:
        """Of a tensor among the arguments, :class:`Meta`; of anything else what the record has there, or None.

        ``given``: the tensors that the call is given.
        """
        if isinstance(reference, Given):
            return meta_of(given[reference.position])
        return self.operators[reference.step].results[reference.result] if isinstance(reference, Made) else None

    def renamed(self, names: Mapping[Any, Any]) -> CallRecord:
        """The record with other symbols in its sizes and numbers."""
        if not names:
            return self

        def rename(value: Any) -> Any:
            return value.xreplace(names) if isinstance(value, sympy.Basic) else value

        operators = tuple(
            RecordedOperator(
                each.overload,
                {name: _map(value, rename) for name, value in each.arguments.items()},
                tuple(_map(value, rename) for value in each.results),
                each.memory,
                each.written,
            )
            for each in self.operators
        )
        return CallRecord(operators, tuple(_map(value, rename) for value in self.result))


def meta_of(tensor: torch.Tensor) -> Meta:
    shape = expressions(tensor.shape)
    stride = expressions(tensor.stride()) if tensor.layout is torch.strided else ()
    return Meta(tensor.dtype, tensor.device, shape, stride)


@dataclass
class Recorder:
    """Collects the operators of one call. ``given``: the tensors that the call is given, the very objects."""

    given: list[torch.Tensor]
    operators: list[RecordedOperator] = field(default_factory=list)
    _references: dict[int, Any] = field(default_factory=dict)
    _numbers: dict[Any, Made] = field(default_factory=dict)
    _memory: dict[StorageKey, int] = field(default_factory=dict)
    _written: dict[StorageKey, int] = field(default_factory=dict)
    """Memory that an operator of the call has written → the id of the tensor that shows what it left there."""
    _alive: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for position, tensor in enumerate(self.given):
            self._references.setdefault(id(tensor), Given(position))
            if is_plain(tensor):
                self._memory.setdefault(storage_of(tensor), position)

    def __call__(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See :func:`glue_compiler.compat.operator_calls.observed_operators`."""
        bound = bound_arguments(overload, args, kwargs)
        arguments = {name: self._described(value) for name, value in bound.items()}
        written = written_names(overload)
        changed = {id(tensor): tensor for tensor in tensors_in([bound[name] for name in written])}
        step, found, memory = len(self.operators), [], []
        for index, leaf in enumerate(leaves(result)):
            if isinstance(leaf, torch.Tensor):
                self._alive.append(leaf)  # so that its id stays its own
                if id(leaf) in changed or not isinstance(self._references.get(id(leaf)), Given):
                    self._references[id(leaf)] = Made(step, index)
                memory.append(self._memory.get(storage_of(leaf), -1) if is_plain(leaf) else -1)
                found.append(meta_of(leaf))
            else:
                if isinstance(leaf, Symbolic):
                    self._numbers.setdefault(expression(leaf), Made(step, index))
                memory.append(-1)
                found.append(expression(leaf))
        self._written.update((storage_of(tensor), name) for name, tensor in changed.items() if is_plain(tensor))
        self.operators.append(RecordedOperator(overload, arguments, tuple(found), tuple(memory), written))

    def record(self, result: Any) -> CallRecord:
        """What was collected, of a call that gave ``result``."""
        return CallRecord(tuple(self.operators), tuple(self._result(leaf) for leaf in leaves(result)))

    def _result(self, leaf: Any) -> Any:
        if isinstance(leaf, Symbolic):
            return self._numbers.get(expression(leaf), expression(leaf))
        return self._described(leaf)

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if is_plain(value) and self._written.get(storage_of(value), id(value)) != id(value):
                return Unknown()
            if id(value) in self._references:
                return self._references[id(value)]
            known = symbols.known_number(value)
            return known if known is not None else Unknown()
        if isinstance(value, tuple | list):
            return tuple(self._described(item) for item in value)
        return expression(value)


def written_names(overload: Any) -> tuple[str, ...]:
    """Of the arguments that an operator writes, as its schema says."""
    given = overload._schema.arguments
    return tuple(each.name for each in given if each.alias_info is not None and each.alias_info.is_write)


def bound_arguments(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the operator's schema, defaults among them."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(overload._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[position]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def map_references(value: Any, convert: Callable[[Given | Made], Any]) -> Any:
    """``value``, an argument or a result of a record, with each reference converted."""
    return _map(value, lambda leaf: convert(leaf) if isinstance(leaf, Given | Made) else leaf)


def _map(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, Meta):
        shape, stride = (tuple(map(convert, each)) for each in (value.shape, value.stride))
        return Meta(value.dtype, value.device, shape, stride)
    if isinstance(value, tuple | list):
        return tuple(_map(item, convert) for item in value)
    return convert(value)
