"""What Dynamo must be able to capture, switched on for glue's own compiles only.

Dynamo ends a graph at ``.item()`` and at operators whose result has a data-dependent shape, unless two flags are set.
They are set around the conversion of one frame, so a call of a compiled module pays nothing, and code of other
backends that is compiled meanwhile does not see them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

from glue_compiler.capture.checkpoint_writes import CheckpointWrites
from glue_compiler.capture.expert_loops import SpeculativeRegions
from glue_compiler.capture.garbage import older_objects_left_out
from glue_compiler.capture.gradient_leaves import GradientLeaves
from glue_compiler.capture.guarded_branches import GuardedBranches
from glue_compiler.capture.inference_mode import InferenceMode
from glue_compiler.capture.known_failures import KnownFailures
from glue_compiler.capture.layer_regions import KnownLayers, LayerRegions
from glue_compiler.capture.regions import Loops
from glue_compiler.capture.size_assumptions import SizeAssumptions
from glue_compiler.capture.traced_writes import TracedWrites
from glue_compiler.compat import dynamo, dynamo_tracing, inductor, layer_calls, python_checkpoints
from glue_compiler.errors import GlueGradientLeafError, GluePythonEffectError, GlueSizeError, first_line

log = logging.getLogger(__name__)

FLAGS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


@dataclass(frozen=True)
class CaptureEvent:
    """A frame that could not be compiled as it was tried first.

    ``retried``: it was converted again without the flags. ``whole``: its layers were to be regions, and are part of its
    graph. Otherwise Dynamo left the frame to eager.
    """

    reason: str
    retried: bool
    whole: bool = False


class Capture(enum.Enum):
    """How the frames of a compile are converted."""

    DYNAMO = "as Dynamo does by itself"
    VALUES = "with data-dependent values"
    LOOPS = "with data-dependent values, and loops traced otherwise than they run"


@dataclass(frozen=True)
class Frame:
    """What is to be converted.

    ``failure``: why it is known to fail with data-dependent values. ``note``: called with an error and its reason.
    """

    convert: Callable[[], Any]
    record: Callable[[CaptureEvent], None]
    failure: str | None
    note: Callable[[Exception, str], None]


def convert_frame(frame: Frame) -> Any:
    """Convert one frame with the flags on, and once more without them where they are what makes it fail.

    With the flags on, branches on what an integer input says are traced as this call takes them.
    """
    if dynamo.dynamo_flags(tuple(FLAGS)) == FLAGS:
        return _convert(frame)
    reason = frame.failure
    try:
        if reason is None:
            result, reason = _with_values(frame)
            if reason is None:
                return result
    except Exception as error:
        if not _may_be_the_flags(error):
            return _raise(error, frame)
        reason = first_line(dynamo.glue_error_in(error) or error)
        frame.note(error, reason)
    log.info("a frame is converted without data-dependent capture: %s", reason)
    frame.record(CaptureEvent(reason, retried=True))
    return _convert(frame)


def _with_values(frame: Frame) -> tuple[Any, str | None]:
    """The frame converted with the flags, and why that is not eager's program; None if it is."""
    writes = TracedWrites()
    checkpoints, branches, assumptions = CheckpointWrites(writes), GuardedBranches(writes), SizeAssumptions(writes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(dynamo.patch_dynamo(FLAGS))
        stack.enter_context(inductor.backward_failures_raised())
        for observer in (writes, checkpoints, branches, assumptions):
            stack.enter_context(dynamo_tracing.traced(observer))
        result = frame.convert()
    return result, assumptions.unguarded or checkpoints.repeated


def convert_frame_with_loops(
    frame: Frame, kinds: Loops, shortened: frozenset[tuple[CodeType, int]] = frozenset()
) -> Any:
    """Convert one frame with loops of ``kinds`` traced otherwise than they run: those over experts for all experts, of
    counted ones two steps. Once more without those if one is not proved, and then without any."""
    with contextlib.closing(SpeculativeRegions(shortened, kinds)) as speculative:
        try:
            with dynamo_tracing.traced(speculative):
                result = convert_frame(frame)
        except Exception as error:
            if not speculative.regions and not speculative.overran:
                raise
            reason = first_line(error)
        else:
            if speculative.all_harmless() and not speculative.overran - shortened:
                return result
            reason = "code of a loop over experts is not proved to do nothing for experts without rows"
            reason = next(filter(None, (region.harm for region in speculative.counted())), reason)
    if speculative.overran - shortened:
        # A mask with a class for "no expert": the weights end one earlier, and eager would fail there too.
        return convert_frame_with_loops(frame, kinds, shortened | speculative.overran)
    left = kinds & ~Loops.COUNTED if any(speculative.counted()) else Loops.NONE
    log.info("a frame is converted again, its loops (all but %s) left to Dynamo: %s", left, reason)
    frame.record(CaptureEvent(reason, retried=True))
    return convert_frame_with_loops(frame, left) if left else convert_frame(frame)


def convert_frame_with_leaves(frame: Frame, convert: Callable[[Frame], Any]) -> Any:
    """Convert one frame with ``requires_grad_()`` left out of its graphs, and once more as it is where that shows."""
    try:
        with dynamo_tracing.traced(GradientLeaves()):
            return convert(frame)
    except Exception as error:
        own = dynamo.glue_error_in(error)
        if not isinstance(own, GlueGradientLeafError):
            raise
        reason = first_line(own)
    log.info("a frame is converted again, its calls of requires_grad_() left to Dynamo: %s", reason)
    frame.record(CaptureEvent(reason, retried=True))
    return convert(frame)


def convert_frame_once(frame: Frame) -> Any:
    """Convert one frame as Dynamo does by itself.

    Each try would be a collective, and whether there is a second one may depend on the rank's own data: the others
    would wait for it.
    """
    reason = "the ranks agree on what they trace (enable_compiler_collectives), in one try"
    frame.record(CaptureEvent(reason, retried=True))
    return _convert(frame)


def _convert(frame: Frame) -> Any:
    try:
        return frame.convert()
    except Exception as error:
        return _raise(error, frame)


def _raise(error: Exception, frame: Frame) -> Any:
    own = dynamo.glue_error_in(error)
    if own is not None:
        raise own from None
    if dynamo.is_soft_failure(error) and not dynamo.is_left_to_python(error):
        frame.record(CaptureEvent(first_line(error), retried=False))
    raise error


def _may_be_the_flags(error: Exception) -> bool:
    """Dynamo leaves many frames to eager anyway; because of a data-dependent value, only with the flags."""
    own = dynamo.glue_error_in(error)
    if own is not None or dynamo.is_recompile_limit(error):
        return isinstance(own, GlueSizeError)
    return not dynamo.is_soft_failure(error) or dynamo.is_data_dependent_failure(error)


def convert_in_regions(frame: Frame, traced: Any, layers: KnownLayers, convert: Callable[[Frame], Any]) -> Any:
    """Convert one frame up to the layers that it calls; or one of a layer, which all layers of its kind share."""
    kind = layers.kind_of_frame(traced)
    if kind is None:
        observer = LayerRegions(layers)
        try:
            with dynamo_tracing.traced(observer), layers.conversion(None):
                try:
                    return convert(frame)
                except Exception:
                    if not observer.learns():
                        raise
                return convert(frame)  # up to the layers that it has come to
        finally:
            for refused in observer.refused:
                frame.record(CaptureEvent(refused, retried=False, whole=True))
    if layers.runs_in_python(kind, traced, lambda reason: frame.record(CaptureEvent(reason, retried=False))):
        return layer_calls.run_in_python()
    settings = {
        # One function serves the layers of all models, and Dynamo counts what it was compiled to for all of them.
        "recompile_limit": sys.maxsize,
        # Dynamo takes one layer's hooks for those of all, unless it guards them: half as long as all other guards.
        "skip_nnmodule_hook_guards": not layers.have_hooks(kind),
        # Up to torch 2.13 Inductor takes the first of a float's values for all of them in a checkpoint of any length.
        "specialize_float": True,
    }
    with dynamo.patch_dynamo(settings), layers.conversion(kind):
        return convert(frame)


@dataclass(frozen=True)
class Asked:
    """What options ask for. ``in_regions``: layers that are alike share compiled code. ``loops``: that passes prove."""

    capture: Capture
    in_regions: bool = False
    loops: Loops = Loops.NONE


class FrameOwner(Protocol):
    """A backend, as this module sees it."""

    known_failures: KnownFailures
    known_layers: KnownLayers

    def begin_frame(self, stored: Mapping[str, Any], code: CodeType) -> Asked:
        """Called before a frame is converted; says how.

        Raises:
            GlueOptionError: for wrong options.
        """
        ...

    def around_bodies(self, stored: Mapping[str, Any]) -> Callable[[], AbstractContextManager[None]] | None:
        """For a checkpoint that Python calls, as ``compile_bodies`` has it."""
        ...

    def record_capture(self, stored: Mapping[str, Any], event: CaptureEvent) -> None: ...


_LEFT_CHECKPOINT = (
    "a graph ends in the body of a checkpoint, as at a hook: torch runs all of that body in eager mode. Without "
    "options={'regions': 'whole'} it is compiled"
)


def _convert_as(asked: Asked, frame: Frame) -> Any:
    if asked.capture is Capture.DYNAMO:
        return _convert(frame)
    if dynamo.ranks_compile_together():
        return convert_frame_once(frame)
    with dynamo_tracing.traced(InferenceMode()):
        has_loops = asked.capture is Capture.LOOPS
        convert_one = functools.partial(convert_frame_with_loops, kinds=asked.loops) if has_loops else convert_frame
        return convert_frame_with_leaves(frame, convert_one)


def install(backend_class: type[FrameOwner]) -> None:
    """Make Dynamo convert the frames of ``backend_class``'s compiles through :func:`convert_frame`."""
    contexts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def around_body(callback: Any) -> Callable[[], AbstractContextManager[None]] | None:
        """Is what a checkpoint in Python calls compiled? With regions, as it would be without the checkpoint."""
        if callback not in contexts:
            backend, stored = dynamo.innermost_backend(callback)
            is_ours = isinstance(backend, backend_class)
            context = backend.around_bodies(stored) if is_ours and not dynamo.ranks_compile_together() else None
            if is_ours and context is None:
                backend.record_capture(stored, CaptureEvent(_LEFT_CHECKPOINT, retried=False))
            contexts[callback] = context
        return contexts[callback]

    @older_objects_left_out()
    def hook(backend: FrameOwner, stored: Mapping[str, Any], traced: Any, convert: Callable[[], Any]) -> Any:
        asked, known = backend.begin_frame(stored, traced.f_code), backend.known_failures
        python_checkpoints.compile_bodies(around_body)
        record = functools.partial(backend.record_capture, stored)
        frame = Frame(convert, record, known.of(traced), known.note)
        convert_one = functools.partial(_convert_as, asked)
        may_share = layer_calls.REGIONS.is_available() and not dynamo.ranks_compile_together()
        try:
            if not (asked.in_regions and may_share):
                return convert_one(frame)
            return convert_in_regions(frame, traced, backend.known_layers, convert_one)
        except GluePythonEffectError as error:
            frame.record(CaptureEvent(first_line(error), retried=False))
            return layer_calls.run_in_python(always=True)

    dynamo.install_frame_hook(lambda backend: isinstance(backend, backend_class), hook)
