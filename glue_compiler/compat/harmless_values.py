"""Dynamo: the kinds of Python values that code may touch and leave as they were. A short list; all others are refused.

Kinds are Dynamo's own names for what a variable stands for. One that a release renames is not on the list any more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

_IMMUTABLE = {
    "ConstantVariable",  # numbers, strings, None, dtypes
    "EnumVariable",
    "NullVariable",  # a place on the stack
    "ObjectVariable",  # a bare object(), as a mark
    "RangeVariable",
    "SizeVariable",
    "SliceVariable",
    "TupleVariable",
}
_IN_GRAPH = {
    # What is done to them becomes nodes, which a pass has to prove.
    "NumpyNdarrayVariable",
    "SymNodeVariable",
    "TensorVariable",
}
_READ = {
    # They may change, but not by instructions that are let through: STORE_ATTR is not, and calls are looked at.
    "DictItemsVariable",
    "DictKeysVariable",
    "DictValuesVariable",
    "PythonModuleVariable",
    "UnspecializedBuiltinNNModuleVariable",
    "UnspecializedNNModuleVariable",
    "UserDefinedClassVariable",
    "UserDefinedObjectVariable",
}
_CONTAINERS = {"ConstDictVariable", "ListVariable", "SetVariable"}
_OWN = {
    # To ask one for the next item changes it.
    "DictItemsIterator",
    "DictKeysIterator",
    "DictValuesIterator",
    "ListIteratorVariable",
    "RangeIteratorVariable",
    "TupleIteratorVariable",
    "ZipVariable",
}
_CALLED = {
    # Their instructions are looked at one by one.
    "NestedUserFunctionVariable",
    "PolyfilledFunctionVariable",
    "UnspecializedBuiltinNNModuleVariable",
    "UnspecializedNNModuleVariable",
    "UserFunctionVariable",
    "UserMethodVariable",
    # torch.no_grad() and the like, which put the mode back; that of any other kind makes a value that is not listed.
    "TorchCtxManagerClassVariable",
    "WithExitFunctionVariable",
}
_MODES = {"GradModeVariable"}
_KNOWN_INDEX = {"HitVariable"}  # refuses by itself all but what is written there

_BUILTINS = {
    # They read their arguments; methods that they run are instructions, which are looked at.
    abs, bool, callable, dict, float, hasattr, int, isinstance, iter, len, list, max, min, range, slice, str, sum,
    tuple, type, zip,
    operator.add, operator.eq, operator.ge, operator.getitem, operator.gt, operator.index, operator.le, operator.lt,
    operator.mul, operator.ne, operator.neg, operator.sub,
}  # fmt: skip
# From 2.13 on; what it gives is a new iterator, or one from outside, which is looked at itself.
_ITER = "IterBuiltinVariable"
_READERS = {
    "ConstDictVariable": {"__contains__", "__getitem__", "__len__", "copy", "get", "items", "keys", "values"},
    "ListVariable": {"__contains__", "__getitem__", "__len__", "copy", "count", "index"},
    "SetVariable": {"__contains__", "__len__", "copy"},
}
_TENSOR_READS = {
    # Methods of tensors and numbers that answer at once, and add no node.
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "ndimension",
    "nelement", "numel", "size", "stride",
}  # fmt: skip
_TORCH_READS = {torch.is_complex, torch.is_floating_point, torch.is_grad_enabled, torch.is_tensor, torch.numel}


def touched(variable: Any) -> Any:
    """Dynamo's variable, of a known kind: one that Dynamo has not looked at yet is looked at."""
    return variable.realize() if hasattr(variable, "realize") else variable


def mutation_token(variable: Any) -> Any:
    """Stands for the object, however many variables Dynamo makes for it; None for what cannot change."""
    return getattr(variable, "mutation_type", None)


def unknown_value(variable: Any, is_own: Callable[[Any], bool]) -> str | None:
    """None if code may hold what ``variable`` stands for, and read it; else what it is.

    ``is_own``: has the code itself made this object?
    """
    kind = type(variable).__name__
    if kind in _IMMUTABLE | _IN_GRAPH | _READ | _CONTAINERS | _CALLED | _MODES | _KNOWN_INDEX:
        return None
    if kind in _OWN:
        return None if is_own(variable) else f"an iterator from outside ({kind})"
    if kind == "BuiltinVariable":
        return None if _is_in(variable.fn, _BUILTINS) else f"'{getattr(variable.fn, '__name__', variable.fn)}'"
    if kind in (_ITER, "TorchInGraphFunctionVariable"):
        return None
    attribute = _attribute(variable)
    if attribute is None:
        return kind
    owner, name = attribute
    holder = type(owner).__name__
    is_read = name in _READERS.get(holder, ())
    if holder in _IMMUTABLE | _IN_GRAPH | _KNOWN_INDEX or is_read or (holder in _CONTAINERS and is_own(owner)):
        return None
    return f"'{name}' of {holder}"


def unknown_call(function: Any, adds_nodes: bool) -> str | None:
    """None if a call of this value, which :func:`unknown_value` let through, leaves Python alone; else what it is."""
    kind = type(function).__name__
    if kind in _CALLED or kind in (_ITER, "BuiltinVariable"):
        return None
    if kind == "TorchInGraphFunctionVariable":
        is_known = adds_nodes or _is_in(function.value, _TORCH_READS)
        return None if is_known else f"'{getattr(function.value, '__name__', function.value)}' without a node"
    attribute = _attribute(function)
    if attribute is None:
        return f"a call of {kind}"
    owner, name = type(attribute[0]).__name__, attribute[1]
    is_known = owner not in _IN_GRAPH or adds_nodes or name in _TENSOR_READS
    return None if is_known else f"'{name}' of {owner} without a node"


def is_container(variable: Any) -> bool:
    """A list, dict or set."""
    return type(variable).__name__ in _CONTAINERS


def is_iterator(variable: Any) -> bool:
    return type(variable).__name__ in _OWN


def is_iter(variable: Any) -> bool:
    """Is it the builtin ``iter``?"""
    kind = type(variable).__name__
    return kind == _ITER or (kind == "BuiltinVariable" and variable.fn is iter)


def is_tensor(variable: Any) -> bool:
    return type(variable).__name__ in _IN_GRAPH


def appended_list(variable: Any) -> Any | None:
    """The list whose ``append`` ``variable`` stands for."""
    owner, name = _attribute(variable) or (None, None)
    return owner if name == "append" and type(owner).__name__ == "ListVariable" else None


def is_placeholder(variable: Any) -> bool:
    """Fills a place on the stack before a call."""
    return type(variable).__name__ == "NullVariable"


def _attribute(variable: Any) -> tuple[Any, str] | None:
    """``(owner, name)`` of what stands for an attribute of a value, looked up and not yet called."""
    kind = type(variable).__name__
    if kind == "GetAttrVariable":
        return touched(variable.obj), variable.name
    if kind == "CallMethodVariable":  # from 2.15 on, for methods of the values that Dynamo models itself
        return touched(variable.obj), variable.method_name
    return None


def _is_in(function: Any, functions: set[Any]) -> bool:
    try:
        return function in functions
    except TypeError:  # not hashable
        return False
