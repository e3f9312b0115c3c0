"""What a node calls, as a value that is equal for calls that do the same."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from glue_compiler.compat import symbols
from glue_compiler.fx.modes import Mode
from glue_compiler.fx.records import CallRecord, Made, Meta
from glue_compiler.fx.values import (
    StorageKey,
    Symbolic,
    expression,
    expressions,
    is_plain,
    leaves,
    requires_grad,
    storage_of,
    unbacked_in,
    value_of,
    values_of,
)


def own_names(record: CallRecord | None, node: fx.Node) -> dict[Any, Any]:
    """Symbols that came into being when the call was run to be recorded → those of the node's own value."""
    if record is None:
        return {}
    inherited = set(unbacked_in(values_of(node.all_input_nodes)))
    names: dict[Any, Any] = {}
    for recorded, leaf in zip(record.result, leaves(value_of(node)), strict=False):
        if isinstance(recorded, Made):
            recorded = record.operators[recorded.step].results[recorded.result]
        numbers = recorded.shape if isinstance(recorded, Meta) else (recorded,)
        actual = expressions(leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))
        for old, new in zip(numbers, actual, strict=False):
            if isinstance(old, sympy.Symbol) and old != new and new is not None and old not in inherited:
                names.setdefault(old, sympy.sympify(new))
    return names


def call_key(node: fx.Node, mode: Mode, shape_env: Any = None, up_to_names: bool = False) -> tuple[Any, dict[Any, Any]]:
    """Equal for two calls that do the same, in the same mode, to operands of the same metadata.

    With ``up_to_names`` but for storage offsets and the names of unbacked symbols; the second value has the name that
    the key uses for each.
    """
    storages: dict[StorageKey, int] = {}
    names: dict[Any, Any] = {}
    # A record counts a call's operands, so one that is passed twice is not two that look alike.
    operands = {operand: i for i, operand in enumerate(node.all_input_nodes)}

    def number(value: Any) -> Any:
        found = expression(value)
        if not up_to_names or not isinstance(found, sympy.Basic):
            return found
        for symbol in sorted(symbols.unbacked_symbols(found), key=str):
            if symbol not in names:
                names[symbol] = sympy.Symbol(f"unbacked_{len(names)}_{symbols.symbol_range(symbol, shape_env)}")
        return found.xreplace(names)

    def describe(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return (operands[value], describe(value_of(value)))
        if isinstance(value, torch.Tensor):
            if not is_plain(value):
                return ("tensor", id(value))
            alias = storages.setdefault(storage_of(value), len(storages))
            shape = tuple(number(size) for size in value.shape)
            stride = tuple(number(step) for step in value.stride())
            offset = None if up_to_names else expression(value.storage_offset())
            return ("tensor", alias, shape, stride, offset, value.dtype, value.device, requires_grad(value))
        if isinstance(value, Symbolic):
            return ("symbol", number(value))
        if isinstance(value, tuple | list):
            return (type(value).__name__, *(describe(item) for item in value))
        if isinstance(value, slice):
            return ("slice", describe(value.start), describe(value.stop), describe(value.step))
        if isinstance(value, dict):
            return ("dict", *((key, describe(item)) for key, item in value.items()))
        return (type(value).__name__, repr(value))

    return (node.op, node.target, mode, describe(node.args), describe(node.kwargs)), names
