"""glue: a ``torch.compile`` backend that removes the work between the fast kernels.

``torch.compile(model, backend="glue")`` needs no import of this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from glue_compiler.errors import (
    GlueContractError,
    GlueError,
    GlueGraphFileError,
    GlueInvariantError,
    GlueOptionError,
    GlueVerifyError,
    GlueWarning,
)

if TYPE_CHECKING:
    from glue_compiler.offload_context import offload_checkpoints
    from glue_compiler.report.explain import Explanation, explain
    from glue_compiler.verify.bisection import bisect, bisect_with_torch
    from glue_compiler.verify.replay import replay

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "GlueContractError",
    "GlueError",
    "GlueGraphFileError",
    "GlueInvariantError",
    "GlueOptionError",
    "GlueVerifyError",
    "GlueWarning",
    "bisect",
    "bisect_with_torch",
    "explain",
    "offload_checkpoints",
    "replay",
]

# Imported when asked for: the pytest plugin is loaded in runs that never use torch.
_HOMES = {
    "Explanation": "glue_compiler.report.explain",
    "explain": "glue_compiler.report.explain",
    "offload_checkpoints": "glue_compiler.offload_context",
    "bisect": "glue_compiler.verify.bisection",
    "bisect_with_torch": "glue_compiler.verify.bisection",
    "replay": "glue_compiler.verify.replay",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'glue_compiler' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
