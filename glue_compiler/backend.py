"""The entry point: ``torch.compile(model, backend="glue")`` calls ``glue`` with each graph that Dynamo captured."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any
from weakref import WeakSet

from torch import fx

from glue_compiler import capture
from glue_compiler.compat import features, python_checkpoints, versions
from glue_compiler.deferred.outputs import defer_outputs
from glue_compiler.errors import GluePythonEffectError
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.handoff import watchers
from glue_compiler.handoff.distinct_results import keep_apart, results_apart
from glue_compiler.handoff.fallback import StepPasses, compile_step
from glue_compiler.handoff.forward_mode import refuse_tangents
from glue_compiler.handoff.hand_off import HandOff, hand_off, hand_off_in_parts
from glue_compiler.handoff.layer_variants import LayerPlans, with_variants
from glue_compiler.handoff.masks import guard_masks, look_at_masks, remember_masks
from glue_compiler.handoff.seen_tokens import keep_needed, remember_seen
from glue_compiler.memory.offload_context import offload_where_asked
from glue_compiler.options import GlueOptions, extra_passes_in, parse_options
from glue_compiler.pipeline import registry
from glue_compiler.pipeline.fuel import RewriteCounter
from glue_compiler.pipeline.results import Numerics, Stage
from glue_compiler.pipeline.run import Pipeline
from glue_compiler.report.session import Session


class GlueBackend:
    """A Dynamo backend: captured graph in, compiled callable out.

    Args:
        hand_off: what compiles the rewritten graph.
        session: collects what was done; by default the one of the ``dump`` folder, if there is one.
    """

    __name__ = "glue"

    def __init__(self, hand_off: HandOff = hand_off, session: Session | None = None) -> None:
        self._hand_off = hand_off
        self._session = session or Session(keeps=False)
        self.frames: WeakSet[CodeType] = WeakSet()
        """The code objects that were compiled with this backend."""
        self.known_failures = capture.KnownFailures()
        self.known_layers = capture.KnownLayers()
        self.rewrites = RewriteCounter()
        self.layer_plans = LayerPlans()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        **_: Any,  # 2.15 passes name=
    ) -> Callable[..., Any]:
        versions.warn_if_untested()
        pipeline = self._pipeline_for({"mode": mode, "options": options})
        if not self.known_layers.are_found:  # passes look at graphs of layers, and those around them, otherwise
            pipeline.options = dataclasses.replace(pipeline.options, regions="whole")
        effects = EffectAnalysis.for_graph(gm)
        if python_checkpoints.in_body() and effects.may_write_outside(gm):
            reason = "what a checkpoint in Python runs writes memory from outside, and runs operator by operator"
            self.record_capture({"mode": mode, "options": options}, capture.CaptureEvent(reason, retried=False))
            return gm.forward
        if python_checkpoints.in_body() and python_checkpoints.changes_python():
            raise GluePythonEffectError("what a checkpoint in Python runs changes Python's objects, and is Python's")
        asked, layers = pipeline.options, self.known_layers.converting
        layer_plan = self.layer_plans.plan_for(self.known_layers, gm, example_inputs, asked.memory_budget)
        leaves = capture.leaves_of(gm, effects)
        groups, masks = results_apart(gm), look_at_masks(gm, tokens=asked.padding == "drop")
        observer = watchers.watch(asked, self._session_for(asked), layers, layer_plan)
        with self.rewrites.undone_on_error():
            reports = pipeline.run(gm, Stage.CAPTURED, observer, effects)
            # Before anything is compiled: the frame is then converted again without the assumption.
            capture.check_proved(
                gm,
                [region for p in reports for region in p.proved],
                (skip.reason for p in reports for skip in p.skips),
            )
            capture.check_rows(gm)
        relied_on = [node for p in reports for node in p.relies_on]
        guard_masks(masks, relied_on, [node for p in reports for node in p.under_one_mask])
        prologues = [p.prologue for p in reports if p.prologue is not None]
        supplied = keep_needed(gm, masks, prologues, len(example_inputs))
        prologues = [supplied.of(prologue) for prologue in prologues]
        observer.handed_off(gm, prologues)
        hand = with_variants(self._hand_off, layer_plan, layers, effects)

        def compiled(passes: StepPasses) -> Callable[..., Any]:
            return hand_off_in_parts(
                hand,
                prologues,
                gm,
                [*example_inputs, *supplied.examples],
                pipeline.options_with(passes),
                pipeline.uuid(passes),
                pipeline.step_edit(passes, observer),
            )

        step_passes = pipeline.step_passes(gm)
        if asked.strict:
            call = compiled(step_passes)
        else:
            call = compile_step(compiled, step_passes, [gm, *(p.graph for p in prologues)], observer)
        deferred = [each for p in reports for each in p.deferred]
        call = defer_outputs(keep_apart(call, groups, [each.position for each in deferred]), deferred)
        call = remember_seen(supplied.to(call), {k: v for p in reports for k, v in p.returned_tokens.items()})
        call = remember_masks(call, {at: kind for p in reports for at, kind in p.returned_masks.items()})
        call = capture.asking(call, leaves)
        changed = [p.name for p in reports if p.changed and p.numerics is Numerics.CLOSE]
        return observer.compiled(refuse_tangents(call, changed))

    # A compiled module is copied and pickled with its backend, which stands for a process and is none of its state.
    def __deepcopy__(self, memo: dict[int, Any]) -> GlueBackend:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        return "glue" if self is glue else (GlueBackend, (self._hand_off, self._session))

    def reset(self) -> None:
        """Called by ``torch.compiler.reset()``: host memory and streams go back."""
        from glue_compiler.ops.copy_engine import engine

        engine.release()
        self.rewrites.reset()
        self.known_failures.clear()
        self.known_layers.clear()
        self.layer_plans.clear()

    def begin_frame(self, stored: Mapping[str, Any], code: CodeType) -> capture.Asked:
        pipeline = self._pipeline_for(stored)  # wrong options and passes are errors before anything is traced
        self.frames.add(code)
        options, how, loops = pipeline.options, capture.Capture.DYNAMO, capture.Loops.NONE
        if options.capture:
            loops = functools.reduce(operator.or_, (p.proves_loops for p in pipeline.passes), loops)
            how = capture.Capture.LOOPS if loops else capture.Capture.VALUES
        return capture.Asked(how, _shares_layers(options), loops)

    def around_bodies(self, stored: Mapping[str, Any]) -> Callable[[], AbstractContextManager[None]] | None:
        options = self._pipeline_for(stored).options
        return functools.partial(offload_where_asked, options.pinned_limit) if _shares_layers(options) else None

    def record_capture(self, stored: Mapping[str, Any], event: capture.CaptureEvent) -> None:
        self._session_for(self._pipeline_for(stored).options).add_capture_event(event)

    def _pipeline_for(self, stored: Mapping[str, Any]) -> Pipeline:
        passes = registry.with_extra(registry.all_passes(), extra_passes_in(stored.get("options")))
        options = parse_options(stored.get("options"), stored.get("mode"), [p.name for p in passes])
        if options.verify:  # Inductor's own random numbers are others than those of the graph from before glue
            inductor = {"fallback_random": True, **options.inductor}
            options = dataclasses.replace(options, inductor=inductor)
        return Pipeline([p for p in passes if features.can_run(p.name)], options, self.rewrites)

    def _session_for(self, options: GlueOptions) -> Session:
        return watchers.session_of(options, self._session)


def _shares_layers(options: GlueOptions) -> bool:
    return options.regions == "auto" and options.capture


capture.install(GlueBackend)

glue = GlueBackend()
