"""Dynamo: one compiled graph of a frame is dropped, so that the frame is compiled again at its next call."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from glue_compiler.compat.parts import ANY, Feature, Uses

RECOMPILE = Feature(
    "planning with what was measured",
    {
        "torch._C._dynamo.eval_frame:_debug_get_cache_entry_list": ANY,
        "torch._C._dynamo.eval_frame:_CacheEntry.compile_id": ANY,
        "torch._C._dynamo.eval_frame:_CacheEntry.guard_manager": ANY,
        "torch._C._dynamo.eval_frame:_ExtraState.invalidate": ANY,
        "torch._dynamo.config:compiled_autograd": ANY,
        "torch._dynamo.config:error_on_recompile": ANY,
        "torch._dynamo.config:accumulated_recompile_limit": ANY,
        "torch._dynamo.eval_frame:_stance": ANY,
        "torch._dynamo.eval_frame:_stance.skip_guard_eval_unsafe": ANY,
        "torch._dynamo.cache_size:_has_same_id_matched_objs": Uses(names=("id_matched_objs", "guard_manager")),
        "torch._dynamo.guards:DeletedGuardManagerWrapper.__init__": Uses(("self", "reason")),
        "torch._dynamo.guards:CheckFunctionManager.invalidate": Uses(names=("cache_entry", "extra_state")),
    },
)


def forget_compiled_graph(codes: Iterable[types.CodeType], compile_id: str, reason: str) -> str | None:
    """Drop what was compiled as ``compile_id``; other graphs of the same code stay, and a call that runs goes on.

    As Dynamo does where an object has died that a graph was compiled for: its guards then hold for no call. Other than
    there it does not count for the frame's ``recompile_limit``.

    Returns:
        Why it was not done, or None. It is not where a recompile would be an error.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo import eval_frame

    stance = eval_frame._stance
    if stance.stance != "default" or stance.skip_guard_eval_unsafe or torch._dynamo.config.error_on_recompile:
        return "the program wants no recompiles"
    for code in codes:
        entries = _debug_get_cache_entry_list(code)
        if any(str(entry.compile_id) == compile_id for entry in entries):
            # For this limit, one that is dropped counts on; all others may be dropped before the next compile.
            if 2 * len(entries) >= torch._dynamo.config.accumulated_recompile_limit:
                return "the frame is near Dynamo's accumulated_recompile_limit"
            return _drop(next(entry for entry in entries if str(entry.compile_id) == compile_id), reason)
    return "the frame that it was compiled for is not found"


def _drop(entry: Any, reason: str) -> str | None:
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    guards = entry.guard_manager
    if getattr(guards, "cache_entry", None) is None or getattr(guards, "extra_state", None) is None:
        return "it is dropped already"
    dropped = DeletedGuardManagerWrapper(reason)
    # Entries of other objects than a call's do not count for its recompile_limit. No call has this one.
    dropped.id_matched_objs = {"": weakref.ref(dropped)}
    guards.extra_state.invalidate(guards.cache_entry, dropped)
    return None


def several_ranks() -> bool:
    """Is this one of several processes of a distributed job?"""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
