"""A compiler that refuses what glue made of a training step gets the step as it was."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from glue_compiler.compat import dynamo
from glue_compiler.errors import GlueError, GlueWarning, first_line
from glue_compiler.fx.snapshots import Snapshot
from glue_compiler.pipeline.graph_pass import PairPass
from glue_compiler.pipeline.observer import Observer

log = logging.getLogger(__name__)

Call = Callable[..., Any]
StepPasses = Sequence[PairPass]


def compile_step(
    compiled: Callable[[StepPasses], Call], passes: StepPasses, graphs: Sequence[fx.GraphModule], observer: Observer
) -> Call:
    """``compiled(passes)``; where the compiler fails, and without ``passes`` does not, a warning and ``compiled(())``.

    A backward graph that is compiled when it first runs may fail there: to compile it earlier would be without knowing
    whether the caller retains the graph.

    Args:
        graphs: what ``compiled`` takes ownership of.
    """
    if not passes:
        return compiled(())
    before = Snapshot(*graphs)
    try:
        return compiled(passes)
    except Exception as error:
        if isinstance(error, GlueError) or not dynamo.is_compilers_failure(error):
            raise
        log.debug("the compiler failed behind %s", [p.name for p in passes], exc_info=True)
        before.restore()
        try:
            call = compiled(())
        except Exception as other:
            log.debug("nor does it compile without them: %s", other)
            raise error from None
        reason = first_line(error)
        observer.refused([p.name for p in passes], reason)
        names = ", ".join(p.name for p in passes)
        warnings.warn(
            f"the compiler failed on a training step ({reason}), and does not without {names}: the step is compiled as "
            f"it was before them. Set strict=True to raise, GLUE_DISABLE={names.replace(', ', ',')} to leave them out.",
            GlueWarning,
            stacklevel=2,
        )
        return call
