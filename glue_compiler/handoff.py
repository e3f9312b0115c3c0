"""From the rewritten graph to a compiled callable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from glue_compiler import compat
from glue_compiler.options import GlueOptions


def hand_off(gm: fx.GraphModule, inputs: Sequence[Any], options: GlueOptions, passes_uuid: bytes) -> Callable[..., Any]:
    """Compile ``gm`` with the compiler that ``options`` names. Takes ownership of ``gm``."""
    if options.compiler == "aot_eager":
        return compat.compile_with_aot_eager(gm, inputs)
    # config_patches, and not a context manager around the call: the backward is compiled after it has returned.
    patches = {**options.inductor, **compat.cache_key_patch(passes_uuid, options.inductor)}
    return compat.compile_with_inductor(gm, inputs, patches)
