"""Dynamo: loops over the nonzero positions of a vector."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx


@contextlib.contextmanager
def traced_iteration(
    length_of: Callable[[Any, fx.Node], int | None],
    decide: Callable[[Any, int, fx.Node, Any], bool | None],
    created: Callable[[Any], None],
    mutated: Callable[[Any, Any], None],
    made: Callable[[fx.Node], None],
) -> Iterator[None]:
    """While Dynamo traces, iterate a tensor of unknown length as ``tensor([0])``, ``tensor([1])``, ... of known value.

    Args:
        length_of: called with Dynamo's translator and the node that is iterated; how many items, or None for Dynamo's
            own way.
        decide: called with Dynamo's translator, the index of a conditional jump, and the node and (of a number) the
            sympy expression of its condition; the condition's value, or None for Dynamo's own way.
        created: called whenever traced code makes a Python object that can change, with a token that stands for it.
        mutated: called whenever traced code changes a Python object, with its token and Dynamo's variable.
        made: called with each node that Dynamo adds to a graph.
    """
    from torch._dynamo.output_graph import SubgraphTracer
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import MutationType
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    saved: list[tuple[type, str, Any]] = []

    def patch(owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        saved.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(replacement(original)))

    def unpack(original: Any) -> Any:
        def unpack_var_sequence(self: Any, tx: Any, idxes: Any = None) -> Any:
            length = length_of(tx, self.as_proxy().node) if idxes is None else None
            if length is None:
                return original(self, tx, idxes)
            return [_hit_variable()(i) for i in range(length)]

        return unpack_var_sequence

    def stepped(original: Any) -> Any:
        def step(self: Any) -> Any:
            at = self.instruction_pointer
            if at is not None and self.stack and self.instructions[at].opname.startswith("POP_JUMP"):
                condition = self.stack[-1]
                if isinstance(condition, TensorVariable | SymNodeVariable):
                    number = getattr(getattr(condition, "sym_num", None), "node", None)
                    node = getattr(condition.as_proxy(), "node", None)
                    value = decide(self, at, node, getattr(number, "expr", None)) if isinstance(node, fx.Node) else None
                    if value is not None:
                        self.stack[-1] = ConstantVariable.create(value)
            return original(self)

        return step

    def noted(original: Any) -> Any:
        def note(self: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
            mutated(variable.mutation_type, variable)
            return original(self, variable, *args, **kwargs)

        return note

    def born(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            created(self)

        return __init__

    def watched(original: Any) -> Any:
        def create_proxy(self: Any, *args: Any, **kwargs: Any) -> Any:
            proxy = original(self, *args, **kwargs)
            made(proxy.node)
            return proxy

        return create_proxy

    patch(TensorVariable, "unpack_var_sequence", unpack)
    patch(InstructionTranslatorBase, "step", stepped)
    patch(SubgraphTracer, "create_proxy", watched)
    patch(MutationType, "__init__", born)
    for name in ("mutation", "store_attr", "store_instance_dict_attr", "store_cell", "store_global"):
        if hasattr(SideEffects, name):
            patch(SideEffects, name, noted)
    try:
        yield
    finally:
        for owner, name, original in reversed(saved):
            setattr(owner, name, original)


@functools.cache
def _hit_variable() -> type:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable

    class HitVariable(VariableTracker):
        """``tensor([index])``, whose value is known while tracing. What is not written here Dynamo refuses to trace."""

        def __init__(self, index: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.index = index

        def python_type(self) -> type:
            return torch.Tensor

        def as_proxy(self) -> Any:
            return known_index(self.index)

        def _item(self, tx: Any, key: Any) -> Any:
            if not key.is_python_constant() or key.as_python_constant() != 0:
                return super().call_method(tx, "__getitem__", [key], {})
            return ConstantVariable.create(self.index)

        def mp_subscript_impl(self, tx: Any, key: Any) -> Any:  # from 2.12 on
            return self._item(tx, key)

        def nb_index_impl(self, tx: Any) -> Any:  # from 2.12 on
            return ConstantVariable.create(self.index)

        def __index__(self) -> int:  # 2.11 calls operator.index on the variable itself
            return self.index

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name == "item" and not args and not kwargs:
                return ConstantVariable.create(self.index)
            if name == "__getitem__" and len(args) == 1 and not kwargs:
                return self._item(tx, args[0])
            return super().call_method(tx, name, args, kwargs)

    return HitVariable


def known_index(index: int) -> slice:
    """What ``x[tensor([index])]`` is traced as: the same elements, as long as it is the only index."""
    return slice(index, index + 1, 1)


def converted_code(frame: Any) -> Any:
    """The code object of the frame that is being converted; ``frame`` may be one that was inlined into it."""
    return frame.output.root_tx.f_code


def local_value(frame: Any, name: str) -> Any:
    """The int, sympy expression or node of a tensor that a local name holds while it is traced; None for others."""
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    variable = frame.symbolic_locals.get(name)
    if isinstance(variable, SymNodeVariable):
        return variable.sym_num.node.expr if isinstance(variable.sym_num, torch.SymInt) else None
    if isinstance(variable, TensorVariable):
        return variable.as_proxy().node
    if variable is not None and variable.is_python_constant():
        value = variable.as_python_constant()
        return value if type(value) is int else None
    return None


def is_list_in(frame: Any, name: str, variable: Any) -> bool:
    """Does a local name hold the list that ``variable`` stands for: a plain list?"""
    from torch._dynamo.variables.lists import ListVariable

    held = frame.symbolic_locals.get(name)
    return type(held) is ListVariable and held.mutation_type is variable.mutation_type


def is_tracing(frame: Any) -> bool:
    """Is ``frame`` the translator at work, and not one that it has inlined?"""
    return frame.output.current_tx is frame


def instructions_of(code: Any) -> Any:
    """The instructions that Dynamo translates a code object from."""
    from torch._dynamo.bytecode_transformation import cleaned_instructions

    return cleaned_instructions(code)


def instruction_index(frame: Any) -> int | None:
    """Index of the instruction that a Dynamo translator runs; None when it is done."""
    return frame.instruction_pointer - 1 if frame.instruction_pointer is not None else None


def loop_about_to_start(frame: Any) -> int | None:
    """Index of the FOR_ITER, if the translator is at the GET_ITER right before it."""
    at = instruction_index(frame)
    if at is None or frame.instructions[at].opname != "GET_ITER" or frame.instructions[at + 1].opname != "FOR_ITER":
        return None
    return at + 1
