"""glue: a ``torch.compile`` backend that removes the work between the fast kernels.

``torch.compile(model, backend="glue")`` needs no import of this package.
"""

from glue_compiler.errors import GlueContractError, GlueError, GlueInvariantError, GlueOptionError, GlueWarning
from glue_compiler.offload_context import offload_checkpoints
from glue_compiler.report.explain import Explanation, explain

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "GlueContractError",
    "GlueError",
    "GlueInvariantError",
    "GlueOptionError",
    "GlueWarning",
    "explain",
    "offload_checkpoints",
]
