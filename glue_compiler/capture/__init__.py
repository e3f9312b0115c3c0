"""What Dynamo must be able to capture, for glue's own compiles only.

``frames.py`` sets Dynamo's flags around the conversion of one frame, and converts it again where they harm. Two
observers answer Dynamo through one hook (``compat/dynamo_tracing.py``) where it would end the graph at a branch:
``guarded_branches.py``, with a guard, and ``expert_loops.py``, with regions (``regions.py``) that a pass has to prove.
``bytecode.py``, ``list_growth.py`` and ``row_conditions.py`` read for the latter. Each says what it lets through, and
why that is safe.
"""

from glue_compiler.capture.frames import FLAGS, CaptureEvent, install
from glue_compiler.capture.regions import check_proved

__all__ = ["FLAGS", "CaptureEvent", "check_proved", "install"]
