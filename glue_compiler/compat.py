"""Every use of torch's private parts, and every difference between torch 2.11 and 2.15. Nothing else.

Other modules call these functions instead of importing ``torch._dynamo``, ``torch._inductor`` and the like, so that a
new torch release is met in this file alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pathlib
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from glue_compiler.errors import GlueError, GlueOptionError, GlueWarning

log = logging.getLogger(__name__)

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)


@functools.cache
def warn_if_untested() -> None:
    """Say once when this torch is outside of what glue is tested with; the compile goes on."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST_TORCH <= version <= NEWEST_TORCH:
        warnings.warn(
            f"glue is tested with torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}, "
            f"this is {torch.__version__}. A rewrite that fails leaves the graph to the compiler as it is.",
            GlueWarning,
            stacklevel=2,
        )


# --- Inductor's options ------------------------------------------------------------------------------------------


def inductor_mode_options(mode: str | None) -> Mapping[str, Any]:
    """The Inductor options that ``torch.compile(mode=...)`` stands for. Raises GlueOptionError on an unknown mode."""
    if mode in (None, "default"):
        return {}
    from torch._inductor import list_mode_options

    try:
        return list_mode_options(mode) or {}
    except RuntimeError as error:  # 2.11 to 2.15: "Unrecognized mode=..., should be one of: ..."
        raise GlueOptionError(str(error)) from None


@functools.cache
def inductor_option_names() -> frozenset[str]:
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def is_inductor_option(name: str) -> bool:
    return name.replace("-", "_") in inductor_option_names()


def checked_inductor_option(name: str, value: Any) -> Any:
    """``value``, if Inductor's option ``name`` takes its type: the check that ``backend="inductor"`` makes."""
    from torch._inductor import config

    expected = config.get_type(name.replace("-", "_"))  # type: ignore[attr-defined]
    if typing.get_origin(expected) is None and not isinstance(value, expected):
        raise GlueOptionError(f"Inductor's option '{name}' is of type {expected.__name__}, not {value!r}")
    return value


# --- Dynamo: one call for each frame that is compiled ----------------------------------------------------------------


def patch_dynamo(flags: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Set Dynamo's config flags for a while."""
    return torch._dynamo.config.patch(dict(flags))


def dynamo_flags(names: Sequence[str]) -> dict[str, bool]:
    return {name: getattr(torch._dynamo.config, name) for name in names}


def is_compiled(model: Any) -> bool:
    return isinstance(model, torch._dynamo.OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable")


def forget_compiled(codes: Iterable[types.CodeType]) -> None:
    """Drop what Dynamo compiled for these code objects."""
    from torch._dynamo.eval_frame import reset_code

    for code in codes:
        reset_code(code)


FrameHook = Callable[[Any, Mapping[str, Any], types.CodeType, Callable[[], Any]], Any]
"""Called with: compiler function, keyword arguments that torch.compile stored for it, the frame's code, convert."""


def install_frame_hook(is_ours: Callable[[Any], bool], hook: FrameHook) -> None:
    """From now on, call ``hook`` around the conversion of each frame that is compiled for a backend of ours.

    A hook at this place costs a *call* of a compiled module nothing, and other backends' compiles one ``if``:
    ``backend_ctx_ctor``, which Dynamo has for such purposes, is dropped by ``torch.compile`` (2.11 to 2.15), and
    it would be entered at each call and stay on while the model runs.
    """
    from torch._dynamo.convert_frame import ConvertFrameAssert

    original = ConvertFrameAssert.__call__
    if hasattr(original, "glue_hook"):
        return

    @functools.wraps(original)
    def convert_frame(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        compiler_fn, stored = _innermost_backend(self._torchdynamo_orig_backend)
        if not is_ours(compiler_fn):
            return original(self, frame, *args, **kwargs)
        return hook(compiler_fn, stored, frame.f_code, lambda: original(self, frame, *args, **kwargs))

    convert_frame.glue_hook = hook  # type: ignore[attr-defined]
    ConvertFrameAssert.__call__ = convert_frame  # type: ignore[method-assign]


def _innermost_backend(backend: Any) -> tuple[Any, Mapping[str, Any]]:
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


# --- Fake tensors and symbols ----------------------------------------------------------------------------------------


def fake_mode_of(tensors: Sequence[torch.Tensor]) -> Any | None:
    """The FakeTensorMode that the first fake tensor belongs to, or None.

    Not ``torch._guards.detect_fake_mode``: while a backend runs, that is another mode than the one which Dynamo
    traced with, whose tensors are on the nodes. Both have the same ShapeEnv.
    """
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, fake_tensor_type())), None)  # type: ignore[attr-defined]


def is_unbacked(symbol: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(symbol))


def unbacked_symbols(value: Any) -> set[Any]:
    """The unbacked sympy symbols in a SymInt, an expression, a tensor's shape, or a nest of those."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(value))


def rename_unbacked(shape_env: Any, old: Any, new: Any) -> None:
    """Make the unbacked symbol ``old`` read as ``new`` in every expression of ``shape_env``."""
    shape_env._rename_unbacked_to(old, new)


@contextlib.contextmanager
def speculation(fake_mode: Any, shape_env: Any) -> Iterator[None]:
    """Run operators on fake tensors without leaving guards or unbacked symbols behind."""
    with contextlib.ExitStack() as stack:
        if fake_mode is not None:
            stack.enter_context(fake_mode)
        if shape_env is not None:
            stack.enter_context(shape_env.suppress_guards())
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
        yield


@contextlib.contextmanager
def restored_on_error(shape_env: Any) -> Iterator[None]:
    """Undo what was renamed in ``shape_env`` if the body raises."""
    if shape_env is None:
        yield
        return
    names = ("replacements", "unbacked_renamings", "var_to_range", "replacements_slocs")
    saved = {name: dict(getattr(shape_env, name)) for name in names if hasattr(shape_env, name)}
    try:
        yield
    except BaseException:
        for name, content in saved.items():
            attribute = getattr(shape_env, name)
            attribute.clear()
            attribute.update(content)
        # The version is what ShapeEnv's memoised simplifications are keyed on.
        shape_env._update_version_counter()
        raise


def upper_bound(expression: Any, shape_env: Any) -> int | None:
    """The value of ``expression`` when the graph was captured, or with unbacked symbols the most it can be, or None."""
    if shape_env is None:
        return None
    value = shape_env.replace(expression)
    if is_unbacked(value):
        bound = shape_env.bound_sympy(value).upper
        return int(bound) if bound.is_Integer else None
    return int(value.xreplace(shape_env.backed_var_to_val))


def may_be_equal(first: Any, second: Any, shape_env: Any) -> bool:
    """Can two expressions of unbacked symbols be equal, as far as the symbols' ranges tell?"""
    return is_unbacked(first - second) and 0 in shape_env.bound_sympy(first - second)


@functools.cache
def fake_tensor_type() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, fake_tensor_type()) and tensor.device.type != "meta"


# --- Tracing tools ---------------------------------------------------------------------------------------------------


def observed(gm: fx.GraphModule, name: str, run: Callable[[fx.GraphModule], Any]) -> Any:
    """Run one pass inside torch's graph-transform observer, so that torch's own tools know it by name.

    Returns None when torch switched the pass off (``inductor.config.disabled_passes``, the compiler bisector).
    """
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    return GraphTransformObserver(gm, name, subsystem="glue").apply_gm_pass(run)


def trace_is_on() -> bool:
    """Is somebody listening to torch's structured trace?"""
    return bool(torch._logging._internal.trace_log.handlers)


def trace_artifact(name: str, payload: Callable[[], str], encoding: str = "string") -> None:
    """Write to torch's structured trace (``TORCH_TRACE``, read by tlparse)."""
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload
    )


def copy_node_attributes(node: fx.Node, copied: fx.Node) -> None:
    """What Dynamo keeps on a node outside of ``meta``, which ``Graph.node_copy`` leaves behind."""
    if hasattr(node, "_dynamo_source"):  # AOTAutograd asks every placeholder for it
        copied._dynamo_source = node._dynamo_source


def graph_break_of(gm: fx.GraphModule) -> tuple[str, Any] | None:
    """(reason, user stack) if Dynamo ended this graph at a graph break."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return reason.reason, reason.user_stack


def current_compile_id() -> str | None:
    compile_id = torch._guards.CompileContext.current_compile_id()
    return str(compile_id) if compile_id is not None else None


# --- Below glue ------------------------------------------------------------------------------------------------------


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], config_patches: Mapping[str, Any]
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, inputs, config_patches=dict(config_patches))
    return cast(Callable[..., Any], compiled)


def compile_with_aot_eager(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, list(inputs))


def cache_key_patch(uuid: bytes, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inductor options that put ``uuid`` into the keys of its caches and of AOTAutograd's, and do nothing else.

    Inductor hashes the ``uuid()`` of custom passes, so a pass that does nothing carries ours. It goes beside the pass
    that the user has set, in ``options`` or in Inductor's config.
    """
    from torch._inductor import config

    existing = options.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    key = CacheKeyPass(uuid)
    if existing is None:
        return {"post_grad_custom_pre_pass": key}
    if version_at_least(2, 13):  # lists of passes came with 2.13
        passes = list(existing) if isinstance(existing, list | tuple) else [existing]
        return {"post_grad_custom_pre_pass": [*passes, key]}
    return {"post_grad_custom_pre_pass": CacheKeyPass(uuid, existing)}


def version_at_least(major: int, minor: int) -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (major, minor)


class CacheKeyPass(torch._inductor.custom_graph_pass.CustomGraphPass):
    """A post-grad pass that changes nothing and whose uuid is glue's part of the cache key."""

    def __init__(self, key: bytes, inner: Callable[[fx.Graph], None] | None = None) -> None:
        self.key = key
        self.inner = inner

    def __call__(self, graph: fx.Graph) -> None:
        if self.inner is not None:
            self.inner(graph)

    def uuid(self) -> Any | None:
        if self.inner is None:
            return self.key
        inner_uuid = getattr(self.inner, "uuid", lambda: None)()
        # None means "do not cache", which the user's own pass may ask for.
        return None if inner_uuid is None else (self.key, inner_uuid)


def hash_of_files(paths: Iterable[pathlib.Path]) -> bytes:
    """Hash of the files' contents and of torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.digest()


# --- Dynamo: loops over the nonzero positions of a vector -----------------------------------------------------------


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
