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
    from glue_compiler.cli.explanation import Explanation, explain
    from glue_compiler.fx.flow import CONVERSIONS, Flow, Refused, Result, Rules
    from glue_compiler.fx.operators import Value
    from glue_compiler.memory.offload_context import offload_checkpoints
    from glue_compiler.pipeline.graph_pass import GraphPass, PairPass, PassContext, PassResult
    from glue_compiler.pipeline.results import Numerics, Skip
    from glue_compiler.pipeline.rewriter import New, Rewriter
    from glue_compiler.verify.bisection import bisect, bisect_with_torch
    from glue_compiler.verify.replay import replay

__version__ = "0.1.0"

__all__ = [
    "CONVERSIONS",
    "Explanation",
    "Flow",
    "GlueContractError",
    "GlueError",
    "GlueGraphFileError",
    "GlueInvariantError",
    "GlueOptionError",
    "GlueVerifyError",
    "GlueWarning",
    "GraphPass",
    "New",
    "Numerics",
    "PairPass",
    "PassContext",
    "PassResult",
    "Refused",
    "Result",
    "Rewriter",
    "Rules",
    "Skip",
    "Value",
    "bisect",
    "bisect_with_torch",
    "explain",
    "offload_checkpoints",
    "replay",
]

_FOR_PASSES = {
    "fx.flow": ("CONVERSIONS", "Flow", "Refused", "Result", "Rules"),
    "fx.operators": ("Value",),
    "pipeline.graph_pass": ("GraphPass", "PairPass", "PassContext", "PassResult"),
    "pipeline.results": ("Numerics", "Skip"),
    "pipeline.rewriter": ("New", "Rewriter"),
}
"""What docs/own_pass.md teaches, by module."""
# Imported when asked for: the pytest plugin is loaded in runs that never use torch.
_HOMES = {
    **{name: f"glue_compiler.{module}" for module, names in _FOR_PASSES.items() for name in names},
    "Explanation": "glue_compiler.cli.explanation",
    "explain": "glue_compiler.cli.explanation",
    "offload_checkpoints": "glue_compiler.memory.offload_context",
    "bisect": "glue_compiler.verify.bisection",
    "bisect_with_torch": "glue_compiler.verify.bisection",
    "replay": "glue_compiler.verify.replay",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'glue_compiler' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
