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
from torch.utils._pytree import tree_leaves

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
        kwargs = kwargs or {}
        if not _is_composite(func):
            result = func(*args, **kwargs)
            self._on_call(func, args, kwargs, result)
            return result
        inner: list[Any] = []
        on_call, self._on_call = self._on_call, lambda *call: inner.append(call)
        try:
            with self:
                result = func.decompose(*args, **kwargs)
        finally:
            self._on_call = on_call
        is_another_name = len(inner) == 1 and _is_made_by(inner[0], (args, kwargs), result)
        on_call(*(inner[0] if is_another_name else (func, args, kwargs, result)))
        return result


def _is_composite(func: Any) -> bool:
    """Is it made of other operators, and not cast by autocast as a whole?"""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    is_cast = any(has_kernel(name, key) for key in ("AutocastCUDA", "AutocastCPU"))
    return has_kernel(name, "CompositeImplicitAutograd") and not is_cast


def _is_made_by(call: Any, given: Any, result: Any) -> bool:
    """Are the tensors of ``result`` those that one inner call has made, of what the outer one was given?

    What draws random numbers does it in another operator on each device. No node has the sizes into which ``chunk``
    splits a tensor of dynamic size.
    """
    func, args, kwargs, made = call
    if func.overloadpacket is torch.ops.aten.split and isinstance(args[1], torch.SymInt):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    ids = [{id(leaf) for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)} for each in (result, made)]
    read = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    return bool(ids[0]) and ids[0] <= ids[1] and read <= {id(leaf) for leaf in tree_leaves(given)}


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

    Operators that an operator is made of are not seen, but for one that is all that an operator dispatches: so another
    name, such as ``multiply``, ``movedim``, ``narrow`` or ``argsort``, is the operator that it stands for.
    """
    with enable_python_dispatcher(), _PreDispatchMode(on_call):
        yield
