"""Dynamo: loops over the nonzero positions of a vector."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx


@contextlib.contextmanager
def traced_iteration(
    length_of: Callable[[Any, fx.Node], int | None],
    mutated: Callable[[], None],
    made: Callable[[fx.Node], None],
) -> Iterator[None]:
    """While Dynamo traces, iterate a tensor of unknown length as the tuples ``(0,)``, ``(1,)``, ... .

    Args:
        length_of: called with Dynamo's translator and the node that is iterated; how many tuples, or None for Dynamo's
            own way.
        mutated: called whenever Dynamo notes that traced code changed a Python object.
        made: called with each node that Dynamo adds to a graph.
    """
    from torch._dynamo.output_graph import SubgraphTracer
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

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
            return [VariableTracker.build(tx, (i,)) for i in range(length)]

        return unpack_var_sequence

    def noted(original: Any) -> Any:
        def note(self: Any, *args: Any, **kwargs: Any) -> Any:
            mutated()
            return original(self, *args, **kwargs)

        return note

    def watched(original: Any) -> Any:
        def create_proxy(self: Any, *args: Any, **kwargs: Any) -> Any:
            proxy = original(self, *args, **kwargs)
            made(proxy.node)
            return proxy

        return create_proxy

    patch(TensorVariable, "unpack_var_sequence", unpack)
    patch(SubgraphTracer, "create_proxy", watched)
    for name in ("mutation", "store_attr", "store_instance_dict_attr", "store_cell", "store_global"):
        if hasattr(SideEffects, name):
            patch(SideEffects, name, noted)
    try:
        yield
    finally:
        for owner, name, original in reversed(saved):
            setattr(owner, name, original)


def instruction_index(frame: Any) -> int | None:
    """Index of the instruction that a Dynamo translator runs; None when it is done."""
    return frame.instruction_pointer - 1 if frame.instruction_pointer is not None else None


def loop_about_to_start(frame: Any) -> int | None:
    """Index of the FOR_ITER, if the translator is at the GET_ITER right before it."""
    at = instruction_index(frame)
    if at is None or frame.instructions[at].opname != "GET_ITER" or frame.instructions[at + 1].opname != "FOR_ITER":
        return None
    return at + 1
