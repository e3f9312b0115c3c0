"""Forward-mode gradients, which the operators of rewritten graphs do not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from glue_compiler.compat.runtime import in_dual_level
from glue_compiler.errors import GlueError


def refuse_tangents(call: Callable[..., Any], passes: Sequence[str]) -> Callable[..., Any]:
    """``call``, with an error in place of tangents that would be lost; itself if no ``passes`` changed its graph.

    Raises:
        GlueError: when called in a ``dual_level`` with a tensor that has a tangent. An operator without a forward-mode
            formula drops it without a word where nothing requires a gradient.
    """
    if not passes:
        return call

    def run(*inputs: Any) -> Any:
        if in_dual_level() and any(_has_tangent(value) for value in inputs):
            off = ", ".join(f'"{name}": False' for name in passes)
            raise GlueError(
                f"forward-mode gradients do not pass through what {', '.join(passes)} wrote. "
                f'Compile with options={{"passes": {{{off}}}}}.'
            )
        return call(*inputs)

    return run


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None
