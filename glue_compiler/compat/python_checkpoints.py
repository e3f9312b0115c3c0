"""Dynamo: a checkpoint that Python calls, because a graph ends in its body, as at a hook of FSDP2.

torch runs such a checkpoint, forward and recomputation, with Dynamo off for all that it calls. Here its body is run
with the compile of the code that calls the checkpoint, as ``checkpoint(torch.compile(function), ...)`` does by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint

from glue_compiler.compat.parts import ANY, Feature, Uses

CHECKPOINTS = Feature(
    "compile of what a checkpoint in Python calls",
    {
        "torch._C._dynamo.eval_frame:set_eval_frame": ANY,
        "torch._compile:_disable_dynamo": Uses(texts=("__dynamo_disable",)),
        "torch._dynamo.decorators:skip": Uses(("fn",)),
        "torch._dynamo.side_effects:SideEffects.is_modified": Uses(("self", "item"), names=("mutation_type",)),
        "torch._dynamo.symbolic_convert:InstructionTranslator.current_tx": ANY,
        "torch._dynamo.variables.base:AttributeMutationExisting": ANY,
        "torch._dynamo.variables.base:ValueMutationExisting": ANY,
        "torch.utils.checkpoint:checkpoint.__wrapped__": Uses(("function",)),
    },
)

_lock = threading.Lock()


def changes_python() -> bool:
    """Does the code that Dynamo is compiling change objects from outside, or hook a tensor? To be asked in a backend.

    Such changes are made behind the graph. What backward computes again ends in the graph, with the last value that it
    needs, and would not make them a second time, as eager code does.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = InstructionTranslator.current_tx().output.side_effects
    is_outside = (AttributeMutationExisting, ValueMutationExisting)
    known = (each for each in effects.id_to_variable.values() if isinstance(each.mutation_type, is_outside))
    return bool(effects.tensor_hooks) or any(map(effects.is_modified, known))


class _Body(threading.local):
    is_running = False


_body = _Body()


def in_body() -> bool:
    """Does this thread run the body of a checkpoint that Python has called, and that is compiled?"""
    return _body.is_running


def compile_bodies(around: Callable[[Any], Callable[[], AbstractContextManager[None]] | None]) -> None:
    """From now on, ask ``around`` at each checkpoint that Python calls in compiled code, with Dynamo's callback.

    The checkpoint runs in the context that it answers, its body compiled; None: in eager mode, as torch runs it. A
    checkpoint outside of compiled code is torch's own.
    """
    if not CHECKPOINTS.is_available():
        return
    with _lock:
        checkpoint: Any = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
        if hasattr(getattr(checkpoint, "__dynamo_disable", None), "glue_asks"):
            return
        from torch._C._dynamo.eval_frame import set_eval_frame
        from torch._dynamo.decorators import skip

        disabled = torch._dynamo.disable(checkpoint, wrapping=False)

        @skip
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            callback = set_eval_frame(None)
            try:
                context = around(callback) if callable(callback) else None
                if context is None:
                    return disabled(function, *args, **kwargs)
                with context():
                    return disabled(_with_callback(function, callback), *args, **kwargs)
            finally:
                set_eval_frame(callback)

        call.glue_asks = True  # type: ignore[attr-defined]
        checkpoint.__dynamo_disable = call


def _apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """What is computed again gets each saved argument as a tensor of its own, of which compiled code may be another."""
    seen = set(map(id, kwargs.values()))
    for each in args:
        yield torch.ops.aten.alias(each) if isinstance(each, torch.Tensor) and id(each) in seen else each
        seen.add(id(each))


def _with_callback(function: Callable[..., Any], callback: Any) -> Callable[..., Any]:
    from torch._C._dynamo.eval_frame import set_eval_frame

    def call(*args: Any, **kwargs: Any) -> Any:
        outer, _body.is_running = _body.is_running, True
        before = set_eval_frame(callback)
        try:
            return function(*_apart(args, kwargs), **kwargs)
        finally:
            set_eval_frame(before)
            _body.is_running = outer

    return call
