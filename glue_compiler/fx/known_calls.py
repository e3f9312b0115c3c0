"""What a node calls and on which values, with what follows of that alone: looked at once, and kept until it changes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.symbols import has_symbols
from glue_compiler.fx.modes import Mode
from glue_compiler.fx.values import StorageKey, Symbolic, is_plain, leaves, storages_of, tensors_in, unbacked_in

_ABSENT = object()
"""In place of a value that is not on record."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call. Two are equal if their ``form`` is, and equal values are at equal places of ``operands``.

    Attributes:
        form: the arguments with each operand left out, in a form that can be hashed.
        operands: in the order in which they stand there; one that is passed twice is there twice.
    """

    form: Hashable
    operands: tuple[fx.Node, ...]

    @classmethod
    def of(cls, arguments: Any) -> Arguments:
        operands: list[fx.Node] = []

        def describe(value: Any) -> Hashable:
            if isinstance(value, fx.Node):
                operands.append(value)
                return None
            if isinstance(value, (tuple, list)):
                return (type(value).__name__, *[describe(item) for item in value])
            if isinstance(value, dict):
                return ("dict", *[(key, describe(item)) for key, item in sorted(value.items())])
            if isinstance(value, slice):
                return ("slice", describe(value.start), describe(value.stop), describe(value.step))
            return (type(value), repr(value))

        return cls(describe(arguments), tuple(operands))


@dataclass
class KnownCall:
    """One call, in one ``mode``, while all symbols read as they did in the version ``symbols``."""

    node: fx.Node
    mode: Mode
    symbols: Any
    around: tuple[fx.Node, ...] = field(init=False)
    """The node and its operands, each once."""
    values: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.around = (self.node, *self.node.all_input_nodes)
        self.values = tuple(map(_on_record, self.around))
        self._call = (self.node.target, self.node.args, self.node.kwargs)

    def is_current(self, mode: Mode, symbols: Any) -> bool:
        """fx replaces arguments when they change, and passes replace values on record: neither is edited."""
        node = self.node
        target, args, kwargs = self._call
        return (
            node.args is args
            and node.target is target
            and node.kwargs is kwargs
            and (mode is self.mode or mode == self.mode)
            and symbols == self.symbols
            and all(map(operator.is_, map(_on_record, self.around), self.values))
        )

    @property
    def operands(self) -> tuple[Any, ...]:
        """The values of the operands, each once; None where nothing is on record."""
        return tuple(None if value is _ABSENT else value for value in self.values[1:])

    @property
    def value(self) -> Any:
        """None if nothing is on record."""
        return None if self.values[0] is _ABSENT else self.values[0]

    @functools.cached_property
    def arguments(self) -> Arguments:
        return Arguments.of(self._call[1:])

    @functools.cached_property
    def read(self) -> frozenset[StorageKey]:
        """The memory of the operands."""
        return frozenset(storages_of(self.operands))

    @functools.cached_property
    def is_plain(self) -> bool:
        """Are all tensors around it dense ones, whose storage tells what they alias?"""
        return all(map(is_plain, tensors_in(self.values)))

    @functools.cached_property
    def unbacked(self) -> tuple[Any, ...]:
        """The unbacked symbols in its value."""
        return tuple(unbacked_in(self.value))

    @functools.cached_property
    def static(self) -> Hashable | None:
        """All that is known of a value without symbols before it is computed; None for others."""
        described: list[tuple[Any, ...]] = []
        for leaf in leaves(self.value):
            if isinstance(leaf, Symbolic):
                return None
            if isinstance(leaf, torch.Tensor):
                if has_symbols(leaf) or not is_plain(leaf):
                    return None
                numbers = (tuple(leaf.shape), tuple(leaf.stride()), (leaf.storage_offset(),))
                described.append((leaf.dtype, leaf.device, numbers, leaf.requires_grad))
            else:
                described.append((type(leaf), repr(leaf)))
        return tuple(described)


def _on_record(node: fx.Node) -> Any:
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val", _ABSENT)
