"""Inductor: its options, its entry, its cache keys."""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from glue_compiler.compat import inplace_buffers
from glue_compiler.compat.parts import ANY, Feature, Uses
from glue_compiler.compat.symbols import unbacked_symbols
from glue_compiler.compat.thread_flag import ThreadFlag
from glue_compiler.compat.versions import torch_version
from glue_compiler.errors import GlueCaptureError, GlueOptionError, first_line

OPTIONS = Feature(
    "check of Inductor's options",
    {
        "torch._inductor:list_mode_options": Uses(("mode",)),
        "torch._inductor.config:get_config_copy": ANY,
        "torch._inductor.config:get_type": ANY,
        "torch._inductor.config:triton.cudagraphs": ANY,
    },
)
"""Without it, what is no option of glue's goes to Inductor as it is, and modes stand for nothing."""

HAND_OFF = Feature(
    "way to Inductor with options, edited training graphs and a cache key of its own",
    {
        "torch._inductor.compile_fx:compile_fx": Uses(("model_", "example_inputs_", "inner_compile", "config_patches")),
        "torch._inductor.compile_fx:compile_fx_inner": Uses(("gm", "example_inputs")),
        "torch._inductor.config:post_grad_custom_pre_pass": ANY,
        "torch._inductor.custom_graph_pass:CustomGraphPass.uuid": Uses(("self",)),
        "torch._inductor.custom_graph_pass:CustomPartitionerFn.uuid": Uses(("self",)),
    },
)
"""Without it, the rewritten graph goes where torch itself sends one, with what Inductor's config says."""

CACHE_FOLDER = Feature("place for compiled kernels", {"torch._inductor.runtime.cache_dir_utils:cache_dir": Uses(())})
"""Without it, kernels of other packages are compiled in each process."""


def inductor_cache_folder() -> str | None:
    """Where Inductor keeps what it compiles, ``TORCHINDUCTOR_CACHE_DIR`` or a folder of the user's."""
    if not CACHE_FOLDER.is_available():
        return None
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def inductor_mode_options(mode: str | None) -> Mapping[str, Any]:
    """The Inductor options that ``torch.compile(mode=...)`` stands for. Raises GlueOptionError on an unknown mode."""
    if mode in (None, "default") or not OPTIONS.is_available():
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
    return not OPTIONS.is_available() or name.replace("-", "_") in inductor_option_names()


def checked_inductor_option(name: str, value: Any) -> Any:
    """``value``, if Inductor's option ``name`` takes its type: the check that ``backend="inductor"`` makes."""
    if not OPTIONS.is_available():
        return value
    from torch._inductor import config

    expected = config.get_type(name.replace("-", "_"))  # type: ignore[attr-defined]
    if typing.get_origin(expected) is None and not isinstance(value, expected):
        raise GlueOptionError(f"Inductor's option '{name}' is of type {expected.__name__}, not {value!r}")
    return value


def switched_off_by_torch(name: str) -> bool:
    """Does ``torch._inductor.config.disabled_passes`` name a pass? A part of the text is enough for torch."""
    from torch._inductor import config

    return name.upper() in str(config.disabled_passes).upper()


def uses_cuda_graphs(options: Mapping[str, Any]) -> bool:
    """Are CUDA graphs on, by ``options`` or by Inductor's config?"""
    if not OPTIONS.is_available():
        return bool(options.get("triton.cudagraphs", False))
    from torch._inductor import config

    return bool(options.get("triton.cudagraphs", config.triton.cudagraphs))


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], config_patches: Mapping[str, Any]
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    is_captured = is_at_work = _raises_failures.is_on

    def compile_one(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        try:
            with _sizes_of_reductions(graph), inplace_buffers.reused():
                return compile_fx_inner(graph, inputs, **kwargs)
        except Exception as error:
            if not is_captured or not kwargs.get("is_backward", False) or not _depends_on_data(graph):
                raise
            if is_at_work:
                raise _BackwardFailed(error) from error
            # No size came from the forward: the graph, which runs for the first time, reads one itself.
            raise GlueCaptureError(f"a backward with sizes that depend on data fails: {first_line(error)}") from error

    try:
        compiled: Any = compile_fx(gm, inputs, compile_one, config_patches=dict(config_patches))
    except _BackwardFailed as failed:
        raise failed.error from None
    finally:
        is_at_work = False
    return cast(Callable[..., Any], compiled)


def _sizes_of_reductions(graph: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """Before 2.13, a reduction over rows that is fused with one over columns is split by how many rows there are, and
    fails if that depends on data. It is split as torch splits up to 30,000 rows."""
    if torch_version() >= (2, 13) or not _depends_on_data(graph):
        return contextlib.nullcontext()
    from torch._inductor import config

    name = "mix_order_reduction_split_size"
    if getattr(config.triton, name, 0) is not None:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any] = config.patch({f"triton.{name}": 16})
    return found


_raises_failures = ThreadFlag()


class _BackwardFailed(BaseException):
    """Passes AOTAutograd's handler of exceptions."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@contextlib.contextmanager
def backward_failures_raised() -> Iterator[None]:
    """A backward graph with sizes that depend on data, and that Inductor cannot compile, is an error of the compile.

    AOTAutograd compiles one together with its forward, because it takes sizes from there. A failure it only logs
    (2.11 to 2.15), for the backward may never run, and fails there if it does.
    """
    with _raises_failures.on():
        yield


def _depends_on_data(graph: fx.GraphModule) -> bool:
    return any(unbacked_symbols(node.meta.get("val")) for node in graph.graph.nodes)


def compile_as_torch_does(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """As ``torch.compile`` does without ``backend``."""
    compiled: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")(gm, list(inputs))
    return compiled


def post_grad_patch(
    uuid: bytes | None, edit: Callable[[fx.Graph], None], options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Inductor options that run ``edit`` on each graph that Inductor is given, and put ``uuid`` into the keys of its
    caches and of AOTAutograd's (None: bypass them).

    Inductor hashes the ``uuid()`` of custom passes. Ours goes beside the pass that the user has set, in ``options`` or
    in Inductor's config.
    """
    from torch._inductor import config

    existing = options.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    ours = PostGradPass(uuid, edit)
    if existing is None:
        return {"post_grad_custom_pre_pass": ours}
    if torch_version() >= (2, 13):  # lists of passes came with 2.13
        passes = list(existing) if isinstance(existing, list | tuple) else [existing]
        return {"post_grad_custom_pre_pass": [*passes, ours]}
    return {"post_grad_custom_pre_pass": PostGradPass(uuid, edit, existing)}


_custom_passes = getattr(torch._inductor, "custom_graph_pass", None)
_CustomGraphPass: Any = getattr(_custom_passes, "CustomGraphPass", object)


class PostGradPass(_CustomGraphPass):
    """A post-grad pass whose uuid is glue's part of the cache key."""

    def __init__(
        self,
        key: bytes | None,
        edit: Callable[[fx.Graph], None],
        inner: Callable[[fx.Graph], None] | None = None,
    ) -> None:
        self.key = key
        self.edit = edit
        self.inner = inner

    def __call__(self, graph: fx.Graph) -> None:
        if self.inner is not None:
            self.inner(graph)
        self.edit(graph)

    def uuid(self) -> Any | None:
        return uuid_beside(self.key, self.inner)


def uuid_beside(key: bytes | None, inner: Any) -> Any | None:
    """The uuid of a custom pass or partitioner of ours that also runs the user's ``inner``, if there is one."""
    if inner is None or key is None:
        return key
    inner_uuid = getattr(inner, "uuid", lambda: None)()
    # None means "do not cache", which the user's own one may ask for.
    return None if inner_uuid is None else (key, inner_uuid)
