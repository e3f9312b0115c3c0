"""Dynamo: one call for each frame that is compiled, its failures, what it left on a graph."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from glue_compiler.compat.dynamo_tracing import unobserved
from glue_compiler.compat.features import LOOKS
from glue_compiler.compat.layer_calls import LEFT_TO_PYTHON
from glue_compiler.compat.parts import ANY, Feature, Uses
from glue_compiler.errors import GlueError


def patch_dynamo(flags: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Set Dynamo's config flags for a while."""
    return torch._dynamo.config.patch(dict(flags))


def dynamo_flags(names: Sequence[str]) -> dict[str, bool]:
    return {name: getattr(torch._dynamo.config, name) for name in names}


def ranks_compile_together() -> bool:
    """Do the ranks of a job tell each other what they trace, once for each frame that is converted?"""
    is_asked = getattr(torch._dynamo.config, "enable_compiler_collectives", False)
    return bool(is_asked) and torch.distributed.is_available() and torch.distributed.is_initialized()


def is_piece_for_ddp() -> bool:
    """Is what is compiled a piece of a graph that DDP has cut for its buckets?

    Its first call is one with fake tensors, and what that returns is what the next piece is compiled for.
    """
    context = torch._guards.TracingContext.try_get()
    return bool(getattr(context, "fakify_first_call", False))


def backend_is_registered() -> bool:
    """Does ``torch.compile(..., backend="glue")`` find glue?"""
    return "glue" in torch._dynamo.list_backends(exclude_tags=None)


def is_compiled(model: Any) -> bool:
    return isinstance(model, torch._dynamo.OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable")


def forget_compiled(codes: Iterable[types.CodeType]) -> None:
    """Drop what Dynamo compiled for these code objects."""
    if not LOOKS.is_available():
        return
    from torch._dynamo.eval_frame import reset_code

    for code in codes:
        reset_code(code)


FRAMES = Feature(
    "capture of data-dependent values",
    {
        "torch:_TorchCompileWrapper": ANY,
        "torch._dynamo.convert_frame:ConvertFrameAssert.__call__": Uses(("self", "frame")),
        "torch._dynamo.convert_frame:ConvertFrameAssert.__init__": Uses(names=("_torchdynamo_orig_backend",)),
        "torch._dynamo.config:capture_dynamic_output_shape_ops": ANY,
        "torch._dynamo.config:capture_scalar_outputs": ANY,
        "torch._dynamo.config:patch": ANY,
        "torch._dynamo.exc:SkipFrame": ANY,
        "torch._dynamo.exc:Unsupported": ANY,
        "torch._dynamo.exc:UserError": ANY,
        "torch.fx.experimental.symbolic_shapes:GuardOnDataDependentSymNode": ANY,
    },
)

FrameHook = Callable[[Any, Mapping[str, Any], Any, Callable[[], Any]], Any]
"""Called with: compiler function, keyword arguments that torch.compile stored for it, the frame, convert."""


def install_frame_hook(is_ours: Callable[[Any], bool], hook: FrameHook) -> None:
    """From now on, call ``hook`` around the conversion of each frame that is compiled for a backend of ours.

    A hook at this place costs a *call* of a compiled module nothing, and other backends' compiles one ``if``:
    ``backend_ctx_ctor``, which Dynamo has for such purposes, is dropped by ``torch.compile`` (2.11 to 2.15), and
    it would be entered at each call and stay on while the model runs.
    """
    if not FRAMES.is_available():
        return
    from torch._dynamo.convert_frame import ConvertFrameAssert

    original = ConvertFrameAssert.__call__
    if hasattr(original, "glue_hook"):
        return

    @functools.wraps(original)
    def convert_frame(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        compiler_fn, stored = innermost_backend(self._torchdynamo_orig_backend)
        with unobserved():
            if not is_ours(compiler_fn):
                return original(self, frame, *args, **kwargs)
            return hook(compiler_fn, stored, frame, lambda: original(self, frame, *args, **kwargs))

    convert_frame.glue_hook = hook  # type: ignore[attr-defined]
    ConvertFrameAssert.__call__ = convert_frame  # type: ignore[method-assign]


def innermost_backend(backend: Any) -> tuple[Any, Mapping[str, Any]]:
    """Look through what Dynamo, ``torch.compile`` and DDP wrap around a backend."""
    stored: Mapping[str, Any] = {}
    while True:
        behind_ddp = getattr(getattr(backend, "__self__", None), "backend_compile_fn", None)
        if behind_ddp is not None:  # DDPOptimizer.compile_fn
            backend = behind_ddp
        elif hasattr(backend, "_torchdynamo_orig_backend"):  # WrapBackendDebug
            backend = backend._torchdynamo_orig_backend
        elif type(backend).__name__ == "_TorchCompileWrapper":
            stored, backend = backend.kwargs, backend.compiler_fn
        elif isinstance(backend, functools.partial):
            stored, backend = {**backend.keywords, **stored}, backend.func
        else:
            return backend, stored


def is_soft_failure(error: BaseException) -> bool:
    """True for what Dynamo answers by leaving a frame to eager: graph breaks that it cannot resume from."""
    from torch._dynamo import exc

    return isinstance(error, exc.Unsupported | exc.UserError | exc.SkipFrame)


def is_left_to_python(error: BaseException) -> bool:
    """Is it a graph that glue ended on purpose, where Dynamo cannot go on behind?"""
    return any(LEFT_TO_PYTHON in str(each) for each in error_chain(error))


def is_compilers_failure(error: BaseException) -> bool:
    """Did what compiles a graph fail, and not the graph's program, the machine's memory, or Dynamo on its own way?"""
    from torch._dynamo import exc

    if any(isinstance(each, torch.OutOfMemoryError | MemoryError) for each in error_chain(error)):
        return False
    return isinstance(error, exc.BackendCompilerFailed) or not isinstance(error, exc.TorchDynamoException)


def is_recompile_limit(error: BaseException) -> bool:
    from torch._dynamo import exc

    kinds = [getattr(exc, name, None) for name in ("RecompileLimitExceeded", "FailOnRecompileLimitHit")]
    return isinstance(error, tuple(kind for kind in kinds if kind))


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and all that it was raised from or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = getattr(error, "inner_exception", None)  # BackendCompilerFailed
        error = inner or error.__cause__ or error.__context__


def is_data_dependent_failure(error: BaseException) -> bool:
    """Did tracing fail because a Python decision needs a value that only exists at run time?"""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return any(
        isinstance(e, GuardOnDataDependentSymNode) or "data-dependent" in str(e).lower() for e in error_chain(error)
    )


def glue_error_in(error: BaseException) -> GlueError | None:
    return next((e for e in error_chain(error) if isinstance(e, GlueError)), None)
