"""Runs passes over one graph: contracts, order, timing, checks, and the way back when one fails.

Who wants to know what happens is an ``Observer``; the pipeline tells it, and knows no more of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from glue_compiler import compat
from glue_compiler.capture.regions import SpeculativeRegion
from glue_compiler.compat import partition
from glue_compiler.deferred.outputs import DeferredOutput
from glue_compiler.errors import GlueContractError, GlueOffloadError, GlueWarning
from glue_compiler.fuel import Fuel, Rewrite, RewriteCounter
from glue_compiler.fx import bodies
from glue_compiler.fx.copying import copy_graph, has_changed
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.invariants import Fault, check_graph, find_faults
from glue_compiler.fx.missing_values import record_missing_values
from glue_compiler.fx.training_pair import TrainingPair, check_pair
from glue_compiler.graph_pass import GraphPass, Numerics, PairPass, PassContext, PassResult, Prologue, Skip, Stage
from glue_compiler.observer import Observer
from glue_compiler.options import GlueOptions
from glue_compiler.sources import sources_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassReport:
    """What one pass did to one graph."""

    name: str
    stage: Stage
    numerics: Numerics
    changed: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    skips: tuple[Skip, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    milliseconds: float = 0.0
    error: str | None = None
    prologue: Prologue | None = None
    proved: tuple[SpeculativeRegion, ...] = ()
    deferred: tuple[DeferredOutput, ...] = ()


_NOBODY = Observer()


class Pipeline:
    """The enabled passes, ordered by their contracts. ``counter`` gives single rewrites their numbers.

    Raises:
        GlueContractError: when the enabled passes cannot run together.
    """

    def __init__(
        self, passes: Sequence[GraphPass], options: GlueOptions, counter: RewriteCounter | None = None
    ) -> None:
        self.options = options
        self.counter = counter or RewriteCounter()
        self.passes = order_by_contract(passes, {p.name for p in passes if options.is_enabled(p.name, p.default)})

    @classmethod
    def of_one(cls, graph_pass: GraphPass, options: GlueOptions) -> Pipeline:
        """``graph_pass`` alone, whatever it requires."""
        pipeline = cls([], options)
        pipeline.passes = (graph_pass,)
        return pipeline

    def run(self, gm: fx.GraphModule, stage: Stage, observer: Observer = _NOBODY) -> list[PassReport]:
        """Run the passes of ``stage`` on ``gm``, in place."""
        context = PassContext(self.options, EffectAnalysis.for_graph(gm))
        record_missing_values(gm, context.effects)
        observer.captured(gm)

        def check(result: PassResult, saved: Saved) -> None:
            def earlier() -> list[Fault]:
                with _restored_for_a_look(saved):
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

    def pair_passes(self, gm: fx.GraphModule) -> tuple[PairPass, ...]:
        """The passes that may have something to do in the forward and backward graphs that ``gm`` becomes."""
        return tuple(p for p in self.passes if isinstance(p, PairPass) and p.wants_pairs(gm, self.options))

    def pair_edit(self, passes: Sequence[PairPass], observer: Observer = _NOBODY) -> partition.Edit | None:
        """What the partitioner is to call with each pair; None without passes over pairs."""
        if not passes:
            return None

        def edit(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
            self.run_pair(TrainingPair(forward, backward, num_outputs), passes, observer)

        return edit

    def options_with(self, passes: Sequence[PairPass]) -> GlueOptions:
        """The options, with what these passes ask of Inductor; the user's own win."""
        wanted = {name: value for p in passes for name, value in p.inductor_options(self.options).items()}
        return dataclasses.replace(self.options, inductor={**wanted, **self.options.inductor})

    def uuid(self, pair_passes: Sequence[PairPass] = ()) -> bytes | None:
        """Identifies the enabled passes: their names, sources and the options they read. None: nothing is to be cached.

        A graph from the cache runs none of ``pair_passes``, so their rewrites would have no numbers, and a dump would
        not show them.
        """
        if self.options.fuel is not None or self.options.verify or (self.options.dump and pair_passes):
            return None
        described = [_described(p, self.options) for p in self.passes]
        return None if None in described else hashlib.sha256(pickle.dumps(described)).digest()

    def _run_one(
        self,
        graph_pass: GraphPass,
        graphs: Sequence[fx.GraphModule],
        run: Callable[[PassContext], PassResult],
        check: Callable[[PassResult, Saved], None],
        context: PassContext,
    ) -> PassReport:
        start = time.perf_counter()
        saved = [pair for gm in graphs for pair in _save(gm)]
        result: PassResult | None = None
        error = None
        fuel = Fuel(self.counter, self.options.fuel)
        context = dataclasses.replace(context, fuel=fuel)
        try:
            with compat.restored_on_error(context.shape_env):
                result = compat.observed(
                    graphs[0], graph_pass.name, lambda _: _checked_result(graph_pass, run(context))
                )
                if result is not None and result.changed:
                    check(result, saved)
                elif any(has_changed(module, graph) for module, graph in saved):
                    raise GlueContractError(
                        f"pass '{graph_pass.name}' changed the graph and says that it did not; "
                        "return PassResult(changed=True) where it does"
                    )
        except Exception as failure:
            fuel.give_back()
            _restore(saved)
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
        result = result or PassResult(changed=False)
        return PassReport(
            name=graph_pass.name,
            stage=graph_pass.stage,
            numerics=graph_pass.numerics,
            changed=result.changed,
            counts=result.counts,
            skips=result.skips,
            rewrites=tuple(fuel.taken),
            milliseconds=(time.perf_counter() - start) * 1000,
            error=error,
            prologue=result.prologue,
            proved=result.proved,
            deferred=result.deferred,
        )


def order_by_contract(passes: Sequence[GraphPass], enabled: set[str]) -> tuple[GraphPass, ...]:
    """The enabled passes, each after those that provide what it requires; otherwise in the order given."""
    chosen = [p for p in passes if p.name in enabled]
    for p in chosen:
        for other in chosen:
            if other is not p and (clash := p.conflicts & (other.provides | {other.name})):
                raise GlueContractError(
                    f"passes '{p.name}' and '{other.name}' exclude each other ({', '.join(sorted(clash))}); "
                    f"switch one off: options={{'passes': {{'{other.name}': False}}}}"
                )
        for fact in sorted(p.requires):
            if not any(fact in other.provides for other in chosen if other is not p):
                providers = [other.name for other in passes if fact in other.provides]
                hint = f"'{providers[0]}' provides it and is off" if providers else "no pass provides it"
                raise GlueContractError(f"pass '{p.name}' requires '{fact}': {hint}")
    ordered: list[GraphPass] = []
    waiting = list(chosen)
    while waiting:
        # Every provider of a fact that is still waiting goes first.
        ready = next(
            (p for p in waiting if not any(p.requires & other.provides for other in waiting if other is not p)), None
        )
        if ready is None:
            raise GlueContractError(f"passes {', '.join(p.name for p in waiting)} require each other in a circle")
        waiting.remove(ready)
        ordered.append(ready)
    return tuple(ordered)


def pass_uuid(graph_pass: GraphPass) -> bytes:
    """Hash of the sources that decide what a pass does: its own, what they import, glue's, and torch's version.

    Raises:
        OSError: if they cannot be found.
    """
    return _toolkit_hash() + compat.hash_of_files(sources_of(type(graph_pass)))


@functools.cache
def _toolkit_sources() -> tuple[Path, ...]:
    folder = Path(__file__).parent
    # Composite operators are traced through after the key was made, so their sources belong to it too.
    parts = [folder, folder / "capture", folder / "fx", folder / "compat", folder / "ops"]
    return tuple(sorted(path for part in parts for path in part.glob("*.py")))


@functools.cache
def _toolkit_hash() -> bytes:
    return compat.hash_of_files(_toolkit_sources())


def _described(graph_pass: GraphPass, options: GlueOptions) -> tuple[str, bytes, bytes] | None:
    """A pass for the cache key, or None when it cannot be told from another one."""
    try:
        return graph_pass.name, pass_uuid(graph_pass), pickle.dumps(graph_pass.cache_options(options))
    except (OSError, SyntaxError, TypeError, AttributeError, pickle.PicklingError) as error:
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


Saved = list[tuple[fx.GraphModule, fx.Graph]]
"""A graph and its bodies: each module, and the graph that it had."""


def _save(gm: fx.GraphModule) -> Saved:
    return [(module, copy_graph(module.graph)[0]) for module in bodies.graph_modules(gm)]


def _restore(saved: Saved) -> None:
    for module, graph in saved:
        module.graph = graph
        module.recompile()


@contextlib.contextmanager
def _restored_for_a_look(saved: Saved) -> Iterator[None]:
    now = [(module, module.graph) for module, _ in saved]
    _restore(saved)
    try:
        yield
    finally:
        _restore(now)
