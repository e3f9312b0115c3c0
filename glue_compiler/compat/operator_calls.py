"""Operators as a program calls them: above autograd, autocast and torch's own decompositions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode

OnCall = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class _PreDispatchMode(SchemaCheckMode):
    """Sees every operator before anything is done for it: ``linear``, ``softmax`` and attention are still whole.

    Torch takes modes of three classes at this place of its dispatcher (2.11 to 2.15); of SchemaCheckMode only the name
    is used.
    """

    def __init__(self, on_call: OnCall) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._on_call = on_call

    def __enter__(self) -> Any:
        return TorchDispatchMode.__enter__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._on_call(func, args, kwargs or {}, result)
        return result


def call_of(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the function or the method that ``node`` calls gives for these values."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def is_higher_order(operator: Any) -> bool:
    """Takes functions, and has no schema."""
    return isinstance(operator, torch._ops.HigherOrderOperator)


def computes_only(operator: Any) -> bool:
    """A higher-order operator that is known to write nothing, whatever functions glue's own operators pass it."""
    return is_higher_order(operator) and operator.name() == "flex_attention"


def wraps_shard(target: Any) -> bool:
    """Is it ``DTensor.from_local``? A graph calls it with its mesh, but in 2.11, where the target has it."""
    module = getattr(target, "__module__", None) or ""
    return getattr(target, "__name__", "") == "from_local" and module.startswith("torch.distributed.tensor.")


@contextlib.contextmanager
def observed_operators(on_call: OnCall) -> Iterator[None]:
    """Call ``on_call(overload, args, kwargs, result)`` after each operator that Python code dispatches.

    Operators that an operator is made of are not seen.
    """
    with enable_python_dispatcher(), _PreDispatchMode(on_call):
        yield
