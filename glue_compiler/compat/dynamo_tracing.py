"""Dynamo: one hook into its tracing, that tells observers what traced code does, and asks them where it branches."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from glue_compiler.compat.known_index import hit_variable


class TracingObserver:
    """Told and asked while Dynamo traces a frame. What a class does not override is left to Dynamo."""

    def length_of(self, frame: Any, iterated: fx.Node) -> int | None:
        """How many items a tensor of unknown length has; they are ``tensor([0])``, ``tensor([1])``, ... then."""
        return None

    def decide(self, frame: Any, at: int | None, node: fx.Node, expression: Any) -> bool | None:
        """The value of a condition that only exists at run time.

        Args:
            frame: Dynamo's translator.
            at: index of the conditional jump; None: Python asks for a bool elsewhere.
            node: of the condition. expression: its sympy expression, if it is a number.
        """
        return None

    def created(self, thing: Any) -> None:
        """Traced code made a Python object that can change; ``thing`` is a token that stands for it."""

    def mutated(self, thing: Any, variable: Any) -> None:
        """Traced code changes a Python object: its token, and Dynamo's variable."""

    def made(self, node: fx.Node) -> None:
        """Dynamo added a node to a graph."""


class _Observers(threading.local):
    now: tuple[TracingObserver, ...] = ()


_observers = _Observers()
_lock = threading.Lock()
_hooks = 0
_saved: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def traced(observer: TracingObserver) -> Iterator[None]:
    """What this thread's Dynamo traces meanwhile, ``observer`` hears of, after the observers around it."""
    with _hooked(), _listening((*_observers.now, observer)):
        yield


def unobserved() -> contextlib.AbstractContextManager[None]:
    """A frame that is converted while another one is compiled is no part of that one."""
    return _listening(())


@contextlib.contextmanager
def _listening(observers: tuple[TracingObserver, ...]) -> Iterator[None]:
    before = _observers.now
    _observers.now = observers
    try:
        yield
    finally:
        _observers.now = before


@contextlib.contextmanager
def _hooked() -> Iterator[None]:
    """Dynamo is as it was when no thread traces for an observer."""
    global _hooks
    with _lock:
        if not _hooks:
            _install()
        _hooks += 1
    try:
        yield
    finally:
        with _lock:
            _hooks -= 1
            if not _hooks:
                _uninstall()


def _install() -> None:
    from torch._dynamo.output_graph import SubgraphTracer
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import MutationType
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    parts = [
        (TensorVariable, "unpack_var_sequence", _unpack),
        (InstructionTranslatorBase, "step", _step),
        (SymNodeVariable, "evaluate_expr", _evaluate),
        (SubgraphTracer, "create_proxy", _create),
        (MutationType, "__init__", _born),
        *[
            (SideEffects, name, _note)
            for name in ("mutation", "store_attr", "store_instance_dict_attr", "store_cell", "store_global")
            if hasattr(SideEffects, name)
        ],
    ]
    for owner, name, replacement in parts:
        original = getattr(owner, name)
        _saved.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(replacement(original)))


def _uninstall() -> None:
    while _saved:
        owner, name, original = _saved.pop()
        setattr(owner, name, original)


def _unpack(original: Callable[..., Any]) -> Callable[..., Any]:
    def unpack_var_sequence(self: Any, tx: Any, idxes: Any = None) -> Any:
        if idxes is None:
            for observer in _observers.now:
                length = observer.length_of(tx, self.as_proxy().node)
                if length is not None:
                    return [hit_variable()(i) for i in range(length)]
        return original(self, tx, idxes)

    return unpack_var_sequence


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    def step(self: Any) -> Any:
        at = self.instruction_pointer
        if _observers.now and at is not None and self.stack and _is_branch(self.instructions[at].opname):
            condition = self.stack[-1]
            if isinstance(condition, TensorVariable | SymNodeVariable):
                value = _decided(self, at, condition)
                if value is not None:
                    self.stack[-1] = ConstantVariable.create(value)
        return original(self)

    return step


def _is_branch(opname: str) -> bool:
    # JUMP_IF_..._OR_POP is left out: it may leave the condition itself behind, as a result.
    return opname.startswith("POP_JUMP") and opname.endswith(("_TRUE", "_FALSE"))


def _evaluate(original: Callable[..., Any]) -> Callable[..., Any]:
    def evaluate_expr(self: Any, output_graph: Any = None) -> Any:
        if _observers.now and output_graph is not None and isinstance(self.sym_num, torch.SymBool):
            value = _decided(output_graph.current_tx, None, self)
            if value is not None:
                return value
        return original(self, output_graph)

    return evaluate_expr


def _decided(frame: Any, at: int | None, condition: Any) -> bool | None:
    node = getattr(condition.as_proxy(), "node", None)
    if not isinstance(node, fx.Node):
        return None
    expression = getattr(getattr(getattr(condition, "sym_num", None), "node", None), "expr", None)
    for observer in _observers.now:
        value = observer.decide(frame, at, node, expression)
        if value is not None:
            return value
    return None


def _note(original: Callable[..., Any]) -> Callable[..., Any]:
    def note(self: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
        for observer in _observers.now:
            observer.mutated(variable.mutation_type, variable)
        return original(self, variable, *args, **kwargs)

    return note


def _born(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for observer in _observers.now:
            observer.created(self)

    return __init__


def _create(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_proxy(self: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = original(self, *args, **kwargs)
        for observer in _observers.now:
            observer.made(proxy.node)
        return proxy

    return create_proxy
