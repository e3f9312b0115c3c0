"""Inference mode in a checkpointed body: Dynamo is told to end the graph there, as at what it cannot trace.

AOTAutograd's trace of such a body leaves the thread's dispatcher as it was inside: from then on, eager operators fail
(torch 2.11 to 2.15). Ending a graph is safe everywhere: the body runs in eager mode, its parts in graphs of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glue_compiler.compat import dynamo_tracing
from glue_compiler.fx.bodies import CHECKPOINT


class InferenceMode(dynamo_tracing.TracingObserver):
    """Of one frame that is being traced."""

    def enters_inference_mode(self, bodies_of: Sequence[Any]) -> str | None:
        if CHECKPOINT in bodies_of:
            return "inference mode in a checkpointed body"
        return None
