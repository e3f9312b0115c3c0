"""Bytes of ours that torch stores with a compiled training step, and finds again when the step comes from its cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from glue_compiler.compat.parts import ANY, Feature, Uses

_RESULT = "torch._functorch._aot_autograd.aot_autograd_result"

STEP_RECORDS = Feature(
    "record of a training step beside torch's cache entry",
    {
        "torch._dynamo.utils:counters": ANY,
        "torch._functorch.aot_autograd:aot_module_simplified": Uses(names=("try_load",)),
        "torch._functorch._aot_autograd.autograd_cache:AOTAutogradCache.try_load": Uses(
            names=("SerializableCompiledFunction",), texts=("aot_autograd", "autograd_cache_hit")
        ),
        f"{_RESULT}:SerializedGraphModule.__init__": Uses(("self", "gm"), ("__reduce__",)),
        f"{_RESULT}:GenericAOTAutogradResult.__dataclass_fields__": Uses(texts=("compiled_bw", "serialized_bw_module")),
    },
)
"""Without it, a step that somebody looks at comes from no cache."""

_NAME = "_glue_step_record"

T = TypeVar("T")


@dataclass(frozen=True)
class CachedStep:
    """A training step that was compiled before. ``record``: what was attached to it; None if it cannot be read."""

    record: bytes | None


def attach(backward: fx.GraphModule, record: bytes) -> None:
    """Store ``record`` with the training step whose backward graph this is; its cache entry holds that graph."""
    setattr(backward, _NAME, record)


def from_cache(compile_step: Callable[[], T]) -> tuple[T, CachedStep | None]:
    """What ``compile_step`` makes with Inductor; and the cached step, if it is a training step and comes from there."""
    from torch._dynamo.utils import counters

    def hits() -> int:
        return int(counters["aot_autograd"]["autograd_cache_hit"])

    before = hits()
    made = compile_step()
    return made, _cached_step(made) if hits() > before else None


def _cached_step(call: Any) -> CachedStep | None:
    try:
        entry = call.serialize()
        if entry.compiled_bw is None:
            return None
        record = entry.serialized_bw_module.args[0].get(_NAME)
    except Exception:  # whatever a file of another process may lead to
        return CachedStep(None)
    return CachedStep(record if isinstance(record, bytes) else None)
