"""Which node made the memory that a node's value lies in, from operator schemas."""

from __future__ import annotations

import operator

import torch
from torch import fx

# Its schema says nothing of it, and it returns its operand's memory.
_UNDECLARED = {torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default}


def storage_root(node: fx.Node) -> fx.Node:
    """Follow views, and the elements of results, back to the node that made the memory (ATen graphs).

    The elements of a list that one operator returns count as one memory.
    """
    while (base := _base(node)) is not None:
        node = base
    return node


def _base(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function":
        return None
    if node.target is operator.getitem and _is_of_its_own(node.args[0], node.args[1]):
        return None
    if node.target is operator.getitem or node.target in _UNDECLARED:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    aliased = {name for ret in schema.returns if ret.alias_info for name in ret.alias_info.before_set}
    for index, parameter in enumerate(schema.arguments):
        alias = parameter.alias_info
        # "Tensor(a -> *) self" with a list of views as the result, which names no memory.
        if alias and (aliased & alias.before_set or "*" in alias.after_set):
            value = node.args[index] if index < len(node.args) else node.kwargs.get(parameter.name)
            return value if isinstance(value, fx.Node) else None
    return None


def _is_of_its_own(operator_call: object, index: object) -> bool:
    """Is this one of several tensors that an operator returns, and new by its schema?"""
    schema = getattr(operator_call.target, "_schema", None) if isinstance(operator_call, fx.Node) else None
    if schema is None or len(schema.returns) < 2 or not isinstance(index, int):
        return False
    result = schema.returns[index]
    return result.alias_info is None and isinstance(result.type, torch.TensorType)
