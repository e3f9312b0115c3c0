"""Runs passes over one graph: order, timing, checks, and the way back when one fails.

Who wants to know what happens is an ``Observer``; the pipeline tells it, and knows no more of it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import pickle
import time
import warnings
from collections.abc import Callable, Sequence

from torch import fx

from glue_compiler.compat import partition, symbols, tracing, versions
from glue_compiler.errors import GlueContractError, GlueOffloadError, GlueWarning
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.invariants import Fault, check_graph, find_faults
from glue_compiler.fx.missing_values import record_missing_values
from glue_compiler.fx.snapshots import Snapshot
from glue_compiler.fx.training_pair import TrainingPair, check_pair
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline.fuel import Fuel, RewriteCounter
from glue_compiler.pipeline.graph_pass import GraphPass, PairPass, PassContext, PassResult
from glue_compiler.pipeline.observer import Observer
from glue_compiler.pipeline.results import PassReport, Stage
from glue_compiler.pipeline.sources import sources_of, sources_of_glue

log = logging.getLogger(__name__)


_NOBODY = Observer()


class Pipeline:
    """The enabled ones of ``passes``, in order. ``counter`` gives single rewrites their numbers."""

    def __init__(
        self, passes: Sequence[GraphPass], options: GlueOptions, counter: RewriteCounter | None = None
    ) -> None:
        self.options = options
        self.counter = counter or RewriteCounter()
        self.passes = tuple(p for p in passes if options.is_enabled(p.name, p.default))

    @classmethod
    def of_one(cls, graph_pass: GraphPass, options: GlueOptions) -> Pipeline:
        """``graph_pass`` alone, on or off."""
        pipeline = cls([], options)
        pipeline.passes = (graph_pass,)
        return pipeline

    def run(
        self,
        gm: fx.GraphModule,
        stage: Stage,
        observer: Observer = _NOBODY,
        effects: EffectAnalysis | None = None,
    ) -> list[PassReport]:
        """Run the passes of ``stage`` on ``gm``, in place. ``effects``: what is known of ``gm`` already."""
        context = PassContext(self.options, effects or EffectAnalysis.for_graph(gm))
        record_missing_values(gm, context.effects)
        observer.captured(gm)

        def check(result: PassResult, before: Snapshot) -> None:
            def earlier() -> list[Fault]:
                with before.restored_for_a_look():
                    return find_faults(gm, context.effects)

            check_graph(gm, context.effects, earlier)
            if result.prologue is not None:
                check_graph(result.prologue.graph, context.effects, earlier)

        reports = []
        for graph_pass in self.passes:
            if graph_pass.stage is stage:
                run = functools.partial(graph_pass.run, gm)
                reports.append(self._run_one(graph_pass, [gm], run, check, context))
                observer.pass_finished(reports[-1], gm)
        return reports

    def run_pair(
        self, pair: TrainingPair, passes: Sequence[PairPass], observer: Observer = _NOBODY
    ) -> list[PassReport]:
        """Run ``passes`` on both graphs of a training step, in place."""
        context = PassContext(self.options, EffectAnalysis.for_graph(pair.forward))
        observer.partitioned(pair)
        reports = []
        for graph_pass in passes:
            run = functools.partial(graph_pass.run_pair, pair)
            graphs = [pair.forward, pair.backward]
            reports.append(self._run_one(graph_pass, graphs, run, lambda *_: check_pair(pair), context))
            observer.pass_finished(reports[-1], pair)
        observer.pair_finished(pair)
        return reports

    def step_passes(self, gm: fx.GraphModule) -> tuple[PairPass, ...]:
        """The passes that may have something to do in the forward and backward graphs that ``gm`` becomes."""
        return tuple(p for p in self.passes if isinstance(p, PairPass) and p.wants_pairs(gm, self.options))

    def step_edit(self, passes: Sequence[PairPass], observer: Observer = _NOBODY) -> partition.Edit | None:
        """What is to happen behind the partitioner; None without passes over training steps."""
        if not passes:
            return None

        def edit(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
            self.run_pair(TrainingPair(forward, backward, num_outputs), passes, observer)

        return partition.Edit(edit)

    def options_with(self, passes: Sequence[PairPass]) -> GlueOptions:
        """The options, with what these passes ask of Inductor; the user's own win."""
        wanted = {name: value for p in passes for name, value in p.inductor_options(self.options).items()}
        return dataclasses.replace(self.options, inductor={**wanted, **self.options.inductor})

    def uuid(self, step_passes: Sequence[PairPass] = ()) -> bytes | None:
        """Identifies the enabled passes: their names, sources and the options they read. None: nothing is to be cached.

        A graph from the cache runs none of ``step_passes``, so that a dump would not show what they do. Nor may one be
        taken that a pass failed on where that is to be an error.
        """
        is_looked_at = bool(step_passes) and self.options.dump is not None
        if is_looked_at or self.options.fuel is not None or self.options.verify:
            return None
        described = [_described(p, self.options) for p in self.passes]
        if None in described:
            return None
        return hashlib.sha256(pickle.dumps((described, self.options.strict))).digest()

    def _run_one(
        self,
        graph_pass: GraphPass,
        graphs: Sequence[fx.GraphModule],
        run: Callable[[PassContext], PassResult],
        check: Callable[[PassResult, Snapshot], None],
        context: PassContext,
    ) -> PassReport:
        start = time.perf_counter()
        before = Snapshot(*graphs)
        result: PassResult | None = None
        error = None
        fuel = Fuel(self.counter, self.options.fuel)
        context = dataclasses.replace(context, fuel=fuel)
        try:
            with symbols.restored_on_error(context.shape_env):
                result = tracing.observed(
                    graphs[0], graph_pass.name, lambda _: _checked_result(graph_pass, run(context))
                )
                if result is not None and result.changed:
                    check(result, before)
                elif before.has_other_nodes():
                    raise GlueContractError(
                        f"pass '{graph_pass.name}' changed the graph and says that it did not; "
                        "return PassResult(changed=True) where it does"
                    )
        except Exception as failure:
            fuel.give_back()
            before.restore()
            if self.options.strict or isinstance(failure, GlueOffloadError):
                raise
            error = f"{type(failure).__name__}: {failure}"
            result = None
            log.debug("pass %s failed", graph_pass.name, exc_info=True)
            warnings.warn(
                f"glue's pass {graph_pass.name} failed ({error}); its graph is compiled as it was before the pass. "
                f"Set strict=True to raise, GLUE_DISABLE={graph_pass.name} to leave it out.",
                GlueWarning,
                stacklevel=2,
            )
        return PassReport(
            **vars(result or PassResult(changed=False)),
            name=graph_pass.name,
            stage=graph_pass.stage,
            numerics=graph_pass.numerics,
            rewrites=tuple(fuel.taken),
            milliseconds=(time.perf_counter() - start) * 1000,
            error=error,
        )


def pass_uuid(graph_pass: GraphPass) -> bytes:
    """Hash of the sources that decide what a pass does: its own, what they import, glue's, and torch's version.

    Raises:
        OSError: if they cannot be found.
    """
    return _hash_of_glue() + versions.hash_of_files(sources_of(type(graph_pass)))


@functools.cache
def _hash_of_glue() -> bytes:
    # Operators among them: composite ones are traced through after the key was made.
    return versions.hash_of_files(sources_of_glue())


def _described(graph_pass: GraphPass, options: GlueOptions) -> tuple[str, bytes, bytes] | None:
    """A pass for the cache key, or None when it cannot be told from another one."""
    try:
        return graph_pass.name, pass_uuid(graph_pass), pickle.dumps(graph_pass.cache_options(options))
    except (OSError, ImportError, SyntaxError, TypeError, AttributeError, pickle.PicklingError) as error:
        warnings.warn(
            f"with the pass '{graph_pass.name}' nothing is cached ({error}); define its class in a file, and let "
            "cache_options return plain data that says what it depends on",
            GlueWarning,
            stacklevel=2,
        )
        return None


def _checked_result(graph_pass: GraphPass, result: object) -> PassResult:
    if not isinstance(result, PassResult):
        raise GlueContractError(
            f"pass '{graph_pass.name}' returned {result!r}; return PassResult(changed=..., counts={{...}})"
        )
    return result
