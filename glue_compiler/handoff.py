"""From the rewritten graph to a compiled callable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from glue_compiler import compat
from glue_compiler.compat import partition
from glue_compiler.options import GlueOptions


def hand_off(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: GlueOptions,
    passes_uuid: bytes,
    edit_pair: partition.Edit | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` with the compiler that ``options`` names. Takes ownership of ``gm``.

    ``edit_pair`` changes the forward and the backward graph of a training step; ``passes_uuid`` stands for it too.
    """
    if options.compiler == "aot_eager":
        if edit_pair is not None:
            return partition.compile_with_aot_eager(gm, inputs, edit_pair)
        return compat.compile_with_aot_eager(gm, inputs)
    # config_patches, and not a context manager around the call: the backward is compiled after it has returned.
    patches = {**options.inductor, **compat.cache_key_patch(passes_uuid, options.inductor)}
    if edit_pair is not None:
        patches = {
            **partition.KEEP_ORDER,
            **patches,
            **partition.partition_patch(passes_uuid, edit_pair, options.inductor),
        }
    return compat.compile_with_inductor(gm, inputs, patches)
