"""Watches a call run on fake tensors: which operators it dispatches, what they write, and whether they wait."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glue_compiler.compat.operator_calls import computes_only, is_higher_order
from glue_compiler.fx.records import Recorder, bound_arguments, written_names
from glue_compiler.fx.values import StorageKey, is_plain, storages_of, tensors_in, unbacked_in

# Operators whose definitions are torch's own: deterministic unless tagged otherwise.
_KNOWN_NAMESPACES = {"aten", "prims", "prim"}
# What a collective gives is there once this has run: for readers, as if it were written then, though no schema says so.
_WAIT = "_c10d_functional::wait_tensor"
# Those of glue's own that compute their results from their operands alone, for a batch's metadata.
_KNOWN_OPERATORS = {
    *("glue::block_lists_of_seen", "glue::mask_blocks", "glue::mask_in_whole_blocks", "glue::materialized"),
    *("glue::row_offsets", "glue::mask_documents"),
}


class CallObserver(TorchDispatchMode):
    """Notes what the operators of one call do, and passes each on to ``parts``.

    Attributes:
        written, made: storages. random: draws random numbers. syncs: waits for the device.
        foreign: an operator of which no schema says all that it does.
        changes_views: gives a tensor another shape or other memory in place.
        writes_unseen: writes memory of a tensor subclass, which is not known.
    """

    supports_higher_order_operators = True

    def __init__(self, parts: Recorder) -> None:
        super().__init__()
        self.parts = parts
        self.written: set[StorageKey] = set()
        self.made: set[StorageKey] = set()
        self.syncs = self.random = self.foreign = self.changes_views = False
        self.writes_unseen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = storages_of([*args, kwargs])
        if is_higher_order(func):
            # Of a higher-order operator no schema tells what it does.
            if not computes_only(func):
                return NotImplemented
            self.foreign = True
            result = func(*args, **kwargs)
            self.made |= storages_of(result) - before
            return result
        result = func(*args, **kwargs)
        self.parts(func, args, kwargs, result)
        self.made |= storages_of(result) - before
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        self.syncs |= torch.Tag.data_dependent_output in func.tags
        # index.Tensor has the tag too, and a new size only for a boolean index.
        if torch.Tag.dynamic_output_shape in func.tags:
            self.syncs |= bool(set(unbacked_in(result)) - set(unbacked_in([*args, kwargs])))
        self.syncs |= _copies_to_host(args, result)
        self.foreign |= func.namespace not in _KNOWN_NAMESPACES and func.name() not in _KNOWN_OPERATORS
        self.changes_views |= torch.Tag.inplace_view in func.tags
        if func.name() == _WAIT:
            self.written |= before
        written = written_operands(func, args, kwargs)
        self.written |= storages_of(written)
        self.writes_unseen |= not all(map(is_plain, tensors_in(written)))
        return result


def written_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The operands that ``func`` writes, as its schema says."""
    if not func._schema.is_mutable:
        return []
    bound = bound_arguments(func, args, kwargs)
    return [bound[name] for name in written_names(func)]


def _copies_to_host(args: Any, result: Any) -> bool:
    devices = {tensor.device.type for tensor in tensors_in(args)}
    return "cuda" in devices and any(tensor.device.type == "cpu" for tensor in tensors_in(result))
