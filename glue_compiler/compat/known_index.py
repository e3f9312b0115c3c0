"""Dynamo: a tensor that holds one index whose value is known while tracing."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate


class _Known(int):
    """The value, in the arguments of a node that is being made."""


@functools.cache
def hit_variable() -> type:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable

    class HitVariable(VariableTracker):
        """``tensor([index])``, or ``tensor(index)``, in int64. What is not written here Dynamo refuses to trace."""

        def __init__(self, index: int, is_scalar: bool = False, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.index = index
            self.is_scalar = is_scalar

        def python_type(self) -> type:
            return torch.Tensor

        def as_proxy(self) -> Any:
            return _Known(self.index) if self.is_scalar else known_index(_Known(self.index))

        def _item(self, tx: Any, key: Any) -> Any:
            if self.is_scalar or not key.is_python_constant() or key.as_python_constant() != 0:
                return super().call_method(tx, "__getitem__", [key], {})
            return HitVariable(self.index, is_scalar=True)

        def mp_subscript_impl(self, tx: Any, key: Any) -> Any:  # from 2.12 on
            return self._item(tx, key)

        def nb_index_impl(self, tx: Any) -> Any:  # from 2.12 on
            return ConstantVariable.create(self.index)

        def nb_int_impl(self, tx: Any) -> Any:  # from 2.12 on
            return ConstantVariable.create(self.index)

        def __index__(self) -> int:  # 2.11 calls operator.index on the variable itself
            return self.index

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name in ("item", "__int__", "__index__") and not args and not kwargs:
                return ConstantVariable.create(self.index)
            if name == "__getitem__" and len(args) == 1 and not kwargs:
                return self._item(tx, args[0])
            return super().call_method(tx, name, args, kwargs)

    return HitVariable


def known_index(index: int) -> slice:
    """What ``x[tensor([index])]`` is traced as: the same elements, as long as it is the only index."""
    return slice(index, type(index)(index + 1), 1)


def replace_known_index(node: fx.Node) -> bool:
    """Where ``node`` indexes a tensor with a known index, it becomes a number; is there one left for anything else?

    Indexing with one element of int64 is the same as with the number, if it has no dimensions; with one dimension only
    where no other index is beside it.
    """
    is_indexing = getattr(node.target, "__name__", "") == "getitem" and len(node.args) == 2 and not node.kwargs
    misused = _mentions_known(node.args[0] if is_indexing else (node.args, node.kwargs))
    if is_indexing and _mentions_known(node.args[1]):
        index = node.args[1]
        beside = index if isinstance(index, tuple | list) else ()
        misused = misused or any(not isinstance(item, _Known) and _mentions_known(item) for item in beside)
    if misused or is_indexing:
        node.args = _with_numbers(node.args)
        node.kwargs = _with_numbers(node.kwargs)
    return misused


def _mentions_known(argument: Any) -> bool:
    found = []
    map_aggregate(_without_slices(argument), lambda item: found.append(item) if isinstance(item, _Known) else None)
    return bool(found)


def _without_slices(argument: Any) -> Any:
    if isinstance(argument, slice):
        return (argument.start, argument.stop, argument.step)
    if isinstance(argument, tuple | list):
        return tuple(_without_slices(item) for item in argument)
    if isinstance(argument, dict):
        return tuple(_without_slices(item) for item in argument.values())
    return argument


def _with_numbers(argument: Any) -> Any:
    if isinstance(argument, slice):
        return slice(*(_with_numbers(part) for part in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, tuple | list):
        return type(argument)(_with_numbers(item) for item in argument)
    if isinstance(argument, dict):
        return {key: _with_numbers(item) for key, item in argument.items()}
    return int(argument) if isinstance(argument, _Known) else argument


def read_as_number(frame: Any, at: int) -> None:
    """Where Python itself asks a known index for its value, the number stands for it.

    In ``list[e]``, and in comparisons with numbers of which only the truth is used: ``if e == 3``.
    """
    from torch._dynamo.variables.constant import ConstantVariable

    stack, name = frame.stack, frame.instructions[at].opname
    if len(stack) < 2 or (not isinstance(stack[-1], hit_variable()) and not isinstance(stack[-2], hit_variable())):
        return
    held = [each.realize() if hasattr(each, "realize") else each for each in stack[-2:]]
    if name == "COMPARE_OP" and _is_asked_for_truth(frame, at):
        numbers = [_number(each) for each in held]
        if None not in numbers:
            stack[-2:] = [ConstantVariable.create(number) for number in numbers]
    elif _is_subscript(frame.instructions[at]) and type(held[0]).__name__ in ("ListVariable", "TupleVariable"):
        stack[-1] = ConstantVariable.create(held[1].index)


def _is_asked_for_truth(frame: Any, at: int) -> bool:
    following = (each.opname for each in frame.instructions[at + 1 :])
    taker = next((name for name in following if name not in ("CACHE", "NOP", "TO_BOOL", "EXTENDED_ARG")), "")
    return taker.startswith("POP_JUMP") and taker.endswith(("_TRUE", "_FALSE"))


def _is_subscript(instruction: Any) -> bool:
    # 3.14 has it as a binary operator, NB_SUBSCR.
    return instruction.opname == "BINARY_SUBSCR" or (instruction.opname == "BINARY_OP" and instruction.arg == 26)


def _number(variable: Any) -> int | None:
    if isinstance(variable, hit_variable()):
        return int(variable.index)  # type: ignore[attr-defined]
    value = variable.as_python_constant() if variable.is_python_constant() else None
    return value if type(value) is int else None
