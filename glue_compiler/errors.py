"""Errors and warnings that glue raises on purpose."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GlueError(Exception):
    """Base class: reaches the user as it is, not wrapped in Dynamo's ``BackendCompilerFailed``."""


class GlueOptionError(GlueError, ValueError):
    """An option, an environment variable or a pass name that glue does not know, or a value of the wrong type."""


class GlueContractError(GlueError):
    """A pass that does not keep to the protocol, cannot be imported, or has the name of another."""


class GlueInvariantError(GlueError):
    """A pass left a graph that is not consistent (see ``fx/invariants.py``)."""


class GlueOffloadError(GlueError):
    """A selective checkpoint policy insists on host memory for a tensor that cannot wait there."""


class GlueGraphFileError(GlueError, ValueError):
    """A file that glue wrote no graph to, or one whose graph does not run here."""


class GlueVerifyError(GlueError, AssertionError):
    """A compiled graph gave other results than its graph from before glue."""


class GlueWarning(UserWarning):
    """Something did not work as asked, and the model still runs."""


class GlueDocumentsWarning(GlueWarning):
    """A model mixes the documents of a packed batch, which its attention keeps apart."""


def first_line(error: BaseException) -> str:
    """``ValueError: what was wrong``, without the lines that follow, but for one that a colon announces."""
    first, *others = str(error).strip().splitlines() or [""]
    announced = f" {others[0]}" if first.endswith(":") and others else ""
    return f"{type(error).__name__}: {first}{announced}"


def unknown_name(kind: str, name: str, known: Iterable[str], *, list_as: str = "Known") -> str:
    """``unknown option 'ofload'; did you mean 'offload'? Known: ...``; ``known`` is listed in full only when short."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"; did you mean '{nearest[0]}'?" if nearest else "."
    shown = ", ".join(names) if len(names) <= 20 else ""
    return f"unknown {kind} '{name}'{hint}" + (f" {list_as}: {shown}." if shown else "")


class GlueCaptureError(GlueError):
    """A graph that was captured where Dynamo by itself would have ended it, and that cannot be used."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}\n{WITHOUT_CAPTURE}")


WITHOUT_CAPTURE = "Without glue's capture (options={'capture': False} or GLUE_CAPTURE=0), Dynamo ends the graph there."


class GlueSpeculationError(GlueCaptureError):
    """What was traced on the assumption that it changes nothing is not proved to; the frame is converted again.

    Never reaches a user.
    """


class GlueGradientLeafError(GlueCaptureError):
    """A graph that depends on a call of ``requires_grad_`` that was left out of it; the frame is converted again.

    Never reaches a user.
    """


class GluePythonEffectError(GlueCaptureError):
    """Code that a checkpoint in Python runs changes what Python holds; it is left to Python.

    Never reaches a user.
    """


class GlueSizeError(GlueCaptureError):
    """A graph that takes two sizes for equal which eager would broadcast; the frame is converted again.

    Never reaches a user.
    """


class GlueDeferredError(GlueError, RuntimeError):
    """Logits that were to be computed when they are read, and cannot be computed any more (``deferred/``)."""
