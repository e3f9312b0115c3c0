"""What Dynamo must be able to capture, switched on for glue's own compiles only.

Dynamo ends a graph at ``.item()`` and at operators whose result has a data-dependent shape, unless two flags are set.
They are set around the conversion of one frame, so a call of a compiled module pays nothing, and code of other
backends that is compiled meanwhile does not see them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

from glue_compiler import compat
from glue_compiler.capture.checkpoint_writes import CheckpointWrites
from glue_compiler.capture.expert_loops import SpeculativeRegions
from glue_compiler.capture.gradient_leaves import GradientLeaves
from glue_compiler.capture.guarded_branches import GuardedBranches
from glue_compiler.capture.inference_mode import InferenceMode
from glue_compiler.capture.size_assumptions import SizeAssumptions
from glue_compiler.capture.traced_writes import TracedWrites
from glue_compiler.errors import GlueGradientLeafError, GlueSizeError, first_line

log = logging.getLogger(__name__)

FLAGS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


@dataclass(frozen=True)
class CaptureEvent:
    """A frame that could not be compiled as it was tried first.

    ``retried``: it was converted again without the flags; otherwise Dynamo left the frame to eager.
    """

    reason: str
    retried: bool


def convert_frame(convert: Callable[[], Any], record: Callable[[CaptureEvent], None]) -> Any:
    """Convert one frame with the flags on, and once more without them where they are what makes it fail.

    With the flags on, branches on what an integer input says are traced as this call takes them.
    """
    if compat.dynamo_flags(tuple(FLAGS)) == FLAGS:
        return _convert(convert, record)
    try:
        writes = TracedWrites()
        checkpoints, branches, assumptions = CheckpointWrites(writes), GuardedBranches(writes), SizeAssumptions(writes)
        with contextlib.ExitStack() as stack:
            stack.enter_context(compat.patch_dynamo(FLAGS))
            for observer in (writes, checkpoints, branches, assumptions):
                stack.enter_context(compat.traced(observer))
            result = convert()
        reason = assumptions.unguarded or checkpoints.repeated
        if reason is None:
            return result
    except Exception as error:
        if not _may_be_the_flags(error):
            return _raise(error, record)
        reason = first_line(compat.glue_error_in(error) or error)
    log.info("a frame is converted again without data-dependent capture: %s", reason)
    record(CaptureEvent(reason, retried=True))
    return _convert(convert, record)


def convert_frame_with_loops(
    convert: Callable[[], Any],
    record: Callable[[CaptureEvent], None],
    shortened: frozenset[tuple[CodeType, int]] = frozenset(),
) -> Any:
    """Convert one frame with loops over experts traced for all experts, and once more as it is if one is not proved."""
    with contextlib.closing(SpeculativeRegions(shortened)) as speculative:
        try:
            with compat.traced(speculative):
                result = convert_frame(convert, record)
        except Exception as error:
            if not speculative.regions and not speculative.overran:
                raise
            reason = first_line(error)
        else:
            if speculative.all_harmless() and not speculative.overran - shortened:
                return result
            reason = "code of a loop over experts is not proved to do nothing for experts without rows"
    if speculative.overran - shortened:
        # A mask with a class for "no expert": the weights end one earlier, and eager would fail there too.
        return convert_frame_with_loops(convert, record, shortened | speculative.overran)
    log.info("a frame is converted again, its loops over experts left to Dynamo: %s", reason)
    record(CaptureEvent(reason, retried=True))
    return convert_frame(convert, record)


def convert_frame_with_leaves(convert: Callable[[], Any], record: Callable[[CaptureEvent], None]) -> Any:
    """Convert one frame with ``requires_grad_()`` left out of its graphs, and once more as it is where that shows."""
    try:
        with compat.traced(GradientLeaves()):
            return convert()
    except Exception as error:
        own = compat.glue_error_in(error)
        if not isinstance(own, GlueGradientLeafError):
            raise
        reason = first_line(own)
    log.info("a frame is converted again, its calls of requires_grad_() left to Dynamo: %s", reason)
    record(CaptureEvent(reason, retried=True))
    return convert()


def convert_frame_once(convert: Callable[[], Any], record: Callable[[CaptureEvent], None]) -> Any:
    """Convert one frame as Dynamo does by itself.

    Each try would be a collective, and whether there is a second one may depend on the rank's own data: the others
    would wait for it.
    """
    record(CaptureEvent("the ranks agree on what they trace (enable_compiler_collectives), in one try", retried=True))
    return _convert(convert, record)


def _convert(convert: Callable[[], Any], record: Callable[[CaptureEvent], None]) -> Any:
    try:
        return convert()
    except Exception as error:
        return _raise(error, record)


def _raise(error: Exception, record: Callable[[CaptureEvent], None]) -> Any:
    own = compat.glue_error_in(error)
    if own is not None:
        raise own from None
    if compat.is_soft_failure(error):
        record(CaptureEvent(first_line(error), retried=False))
    raise error


def _may_be_the_flags(error: Exception) -> bool:
    """Dynamo leaves many frames to eager anyway; because of a data-dependent value, only with the flags."""
    own = compat.glue_error_in(error)
    if own is not None or compat.is_recompile_limit(error):
        return isinstance(own, GlueSizeError)
    return not compat.is_soft_failure(error) or compat.is_data_dependent_failure(error)


class FrameOwner(Protocol):
    """A backend, as this module sees it."""

    def begin_frame(self, stored: Mapping[str, Any], code: CodeType) -> bool:
        """Called before a frame is converted; says whether its loops over experts are to be traced for all experts.

        Raises:
            GlueOptionError: for wrong options.
        """
        ...

    def record_capture(self, stored: Mapping[str, Any], event: CaptureEvent) -> None: ...


def install(backend_class: type[FrameOwner]) -> None:
    """Make Dynamo convert the frames of ``backend_class``'s compiles through :func:`convert_frame`."""

    def hook(backend: FrameOwner, stored: Mapping[str, Any], code: CodeType, convert: Callable[[], Any]) -> Any:
        convert_one = convert_frame_with_loops if backend.begin_frame(stored, code) else convert_frame
        record = functools.partial(backend.record_capture, stored)
        if compat.ranks_compile_together():
            return convert_frame_once(convert, record)
        with compat.traced(InferenceMode()):
            return convert_frame_with_leaves(lambda: convert_one(convert, record), record)

    compat.install_frame_hook(lambda backend: isinstance(backend, backend_class), hook)
