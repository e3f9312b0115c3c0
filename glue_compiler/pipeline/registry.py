"""Which passes exist, in the order in which they run."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from glue_compiler.errors import GlueContractError, GlueWarning
from glue_compiler.pipeline.graph_pass import GraphPass, PairPass
from glue_compiler.pipeline.results import Numerics, Stage

_BUILT_IN = (
    "glue_compiler.passes.trace_vmap:TraceVmap",
    "glue_compiler.passes.group_experts:GroupExperts",
    "glue_compiler.passes.roll_loops:RollLoops",
    "glue_compiler.passes.drop_padding:DropPadding",
    "glue_compiler.passes.specialize_attention:SpecializeAttention",
    "glue_compiler.passes.chunk_loss:ChunkLoss",
    "glue_compiler.passes.sum_embedding_grads:SumEmbeddingGrads",
    "glue_compiler.passes.hoist_metadata:HoistMetadata",
    "glue_compiler.passes.memoize_metadata:MemoizeMetadata",
    "glue_compiler.passes.overlap_offload:OverlapOffload",
    "glue_compiler.passes.fuse_dequantization:FuseDequantization",
    "glue_compiler.passes.share_layers:ShareLayers",
)

ENTRY_POINTS = "glue_compiler.passes"
"""The group of entry points under which an installed package registers passes: ``name = "module:Class"``."""


@functools.cache
def all_passes() -> tuple[GraphPass, ...]:
    """One object of each pass: glue's own, then those of installed packages. They hold no state."""
    found = tuple(resolve_pass(entry) for entry in _BUILT_IN)
    for entry in sorted(entry_points(group=ENTRY_POINTS)):
        found = _with_installed(found, entry)
    return found


def _with_installed(passes: tuple[GraphPass, ...], entry: EntryPoint) -> tuple[GraphPass, ...]:
    try:
        return with_extra(passes, [entry.value])
    except GlueContractError as error:
        # A package that is installed for something else must not stop every compile.
        warnings.warn(f"the entry point '{entry.name}' of '{ENTRY_POINTS}' is left out: {error}", GlueWarning, 2)
        return passes


def pass_names() -> tuple[str, ...]:
    return tuple(graph_pass.name for graph_pass in all_passes())


def with_extra(passes: Sequence[GraphPass], extra: Sequence[Any]) -> tuple[GraphPass, ...]:
    """``passes``, and the user's own after them: objects, classes, or names as ``"module:Class"``.

    Raises:
        GlueContractError: says what to change, when one is no pass, or its name is taken.
    """
    found = list(passes)
    for entry in extra:
        graph_pass = resolve_pass(entry)
        if any(graph_pass.name == other.name for other in found):
            raise GlueContractError(f"there are two passes named '{graph_pass.name}'; give yours another name")
        found.append(graph_pass)
    return tuple(found)


def resolve_pass(entry: Any) -> GraphPass:
    """A pass from an object, a class, or a name as ``"module:Class"``.

    Raises:
        GlueContractError: says what to change.
    """
    if isinstance(entry, str):
        entry = _import(entry)
    if inspect.isclass(entry) and issubclass(entry, GraphPass):
        if missing := sorted(getattr(entry, "__abstractmethods__", ())):
            raise GlueContractError(f"pass {entry.__qualname__} has no method '{missing[0]}'; define it")
        try:
            entry = entry()
        except TypeError as error:
            raise GlueContractError(
                f"pass {entry.__qualname__} cannot be made without arguments ({error}); hand over an object instead"
            ) from error
    if not isinstance(entry, GraphPass):
        raise GlueContractError(
            f"{entry!r} is no pass; derive its class from glue_compiler.pipeline.graph_pass.GraphPass"
        )
    _check_declarations(entry)
    return entry


def _import(name: str) -> Any:
    module, colon, path = name.partition(":")
    if not colon:
        raise GlueContractError(f"'{name}' names no pass; write 'module:Class'")
    try:
        return functools.reduce(getattr, path.split("."), import_module(module))
    except (ImportError, AttributeError) as error:
        raise GlueContractError(f"the pass '{name}' cannot be imported: {error}") from error


def _check_declarations(graph_pass: GraphPass) -> None:
    kind = type(graph_pass).__qualname__
    name = getattr(graph_pass, "name", None)
    if not isinstance(name, str) or not name:
        raise GlueContractError(f'pass {kind} has no name; write: name = "a_verb_with_an_object"')
    if not isinstance(getattr(graph_pass, "numerics", None), Numerics):
        raise GlueContractError(
            f"pass '{name}' does not say what it does to results; write: numerics = Numerics.BITWISE, or CLOSE"
        )
    if (graph_pass.stage is Stage.PARTITIONED) != isinstance(graph_pass, PairPass):
        raise GlueContractError(
            f"pass '{name}' is of stage {graph_pass.stage}; passes of PARTITIONED derive from PairPass, others do not"
        )
