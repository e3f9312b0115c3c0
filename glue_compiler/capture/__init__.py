"""What Dynamo must be able to capture, for glue's own compiles only.

``frames.py`` sets Dynamo's flags around the conversion of one frame, and converts it again where they harm, once
(``known_failures.py``). Observers listen to Dynamo through one hook (``compat/dynamo_tracing.py``). Two answer where it
would end the graph at a branch:
``guarded_branches.py``, with a guard, and ``expert_loops.py``, with regions (``regions.py``; those of
``counted_loops.py`` are two steps, for all) that a pass has to prove
and whose Python code must be known to be harmless (``harmless.py``). ``size_assumptions.py`` finds what Dynamo takes
for granted and eager does not, ``checkpoint_writes.py`` writes that eager repeats and a graph does not;
``traced_writes.py`` notes which memory was written; ``gradient_leaves.py`` lets ``requires_grad_()`` through;
``inference_mode.py`` ends the graph at what torch cannot compile, ``layer_regions.py`` where layers begin;
``garbage.py`` keeps Python's collections short meanwhile.
``input_functions.py``, ``index_puts.py``, ``bytecode.py``, ``list_growth.py`` and ``row_conditions.py`` read for them.
Each says what it lets through, and why that is safe.
"""

from glue_compiler.capture.frames import FLAGS, Asked, Capture, CaptureEvent, install
from glue_compiler.capture.gradient_leaves import asking, leaves_of
from glue_compiler.capture.index_puts import check_rows
from glue_compiler.capture.known_failures import KnownFailures
from glue_compiler.capture.layer_regions import KnownLayers, LayerKind
from glue_compiler.capture.regions import Loops, check_proved

__all__ = [
    "FLAGS",
    "Asked",
    "Capture",
    "CaptureEvent",
    "KnownFailures",
    "KnownLayers",
    "LayerKind",
    "Loops",
    "asking",
    "check_proved",
    "check_rows",
    "install",
    "leaves_of",
]
