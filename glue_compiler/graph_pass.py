"""The protocol between a rewrite and the pipeline that runs it."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from glue_compiler.fuel import Fuel

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.capture.regions import SpeculativeRegion
    from glue_compiler.deferred.outputs import DeferredOutput
    from glue_compiler.fx.effects import EffectAnalysis
    from glue_compiler.fx.training_pair import TrainingPair
    from glue_compiler.options import GlueOptions
    from glue_compiler.pipeline import PassReport


class Stage(enum.Enum):
    """When in a compile a pass runs."""

    CAPTURED = "captured"
    """On Dynamo's graph, before AOTAutograd: torch-level operators, higher-order operators with bodies."""
    JOINT = "joint"
    """On the joint graph of a training step, which is partitioned next (:class:`JointPass`): ATen operators."""
    PARTITIONED = "partitioned"
    """On the forward and the backward graph of a training step (:class:`PairPass`): ATen operators, no bodies."""


class Numerics(enum.Enum):
    """What a pass may do to results."""

    BITWISE = "bitwise"
    """Outputs and gradients keep every bit (as long as the backend below computes operators one by one)."""
    CLOSE = "close"
    """Outputs and gradients agree within the rounding of their dtype."""


@dataclass(frozen=True)
class Skip:
    """A place that a pass looked at and left alone.

    ``reason`` says why, and what would change it; ``node`` is the graph node's name; ``source`` the user's line,
    ``file.py:12 in forward``, or ``""`` when the graph does not know it.
    """

    reason: str
    node: str = ""
    source: str = ""


@dataclass(frozen=True)
class Prologue:
    """A graph that a pass split off: pure, and run once per batch in front of the graph it was taken from.

    Attributes:
        graph: takes the inputs of the captured graph at the positions ``inputs``; returns a tuple.
        results: fake values of what it returns: tensors that share no memory with its inputs, and symbolic integers.
            The rest of the captured graph takes them after its own inputs.
        key: equal for prologues that give equal results for equal inputs.
    """

    graph: fx.GraphModule
    inputs: tuple[int, ...]
    results: tuple[Any, ...]
    key: Hashable = field(repr=False)


@dataclass(frozen=True)
class PassResult:
    """What a pass did: ``changed`` must be true if anything in the graph is different.

    ``proved``: the speculative regions (``capture/regions.py``) of which the pass has proved that running their code
    where eager does not run it does nothing. It holds if the pass is not rolled back.
    ``deferred``: the graph's outputs that it no longer makes: they are computed when somebody reads them, from its
    inputs and from outputs of glue's own behind those that the caller gets.
    ``drawing``: what ``glue view`` draws of a plan, as data for JSON.
    """

    changed: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    skips: tuple[Skip, ...] = ()
    prologue: Prologue | None = None
    proved: tuple[SpeculativeRegion, ...] = ()
    deferred: tuple[DeferredOutput, ...] = ()
    drawing: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PassContext:
    """What a pass may read besides the graph."""

    options: GlueOptions
    effects: EffectAnalysis
    """What the nodes of this graph do; shared by all passes over it."""
    fuel: Fuel = field(default_factory=Fuel)
    """Asked before each single rewrite: ``if context.fuel.take("merge b into a"): ...``."""

    @property
    def shape_env(self) -> Any | None:
        """Where the graph's symbols live; None if the graph holds no fake tensor."""
        return self.effects.fake_mode.shape_env if self.effects.fake_mode is not None else None


class GraphPass(ABC):
    """A rewrite. Holds no state: the same object runs on many graphs, from several threads.

    A pass is on by default when ``default`` is true; ``options={"passes": {name: bool}}`` and ``GLUE_DISABLE``
    overrule it. ``requires``, ``provides`` and ``conflicts`` name facts about the graph (contracts), which
    order the passes and are checked before any of them runs.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage] = Stage.CAPTURED
    numerics: ClassVar[Numerics]
    default: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()
    proves_loops: ClassVar[bool] = False
    """Does it prove loops over experts, so that capture may trace them for all experts?"""

    @abstractmethod
    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        """Rewrite ``graph`` in place. May raise: the pipeline then restores the graph."""

    def cache_options(self, options: GlueOptions) -> Any:
        """What this pass depends on besides its source, as plain data that can be pickled, for the cache key.

        The options that it reads, and what it was made with: by default its attributes.
        """
        return vars(self)


class PairPass(GraphPass):
    """A rewrite of the stage ``PARTITIONED``. ``run`` is not called."""

    stage: ClassVar[Stage] = Stage.PARTITIONED
    changes_peak: ClassVar[bool] = True
    """May another peak of memory come of it? If not, it does not run where a pair is only tried out for its peak."""

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        raise NotImplementedError(f"{self.name} works on the forward and backward graph together")

    def is_asked_for(self, options: GlueOptions) -> bool:
        """May there be anything to do in a plain graph? False: only in one that asks, as checkpoint policies do."""
        return True

    def wants_pairs(self, graph: fx.GraphModule, options: GlueOptions) -> bool:
        """May there be anything to do for this captured graph? If no pass wants it, the partitioner is left alone."""
        return True

    def inductor_options(self, options: GlueOptions) -> Mapping[str, Any]:
        """What Inductor must keep to for the result of this pass to last; the user's own options win."""
        return {}

    @abstractmethod
    def run_pair(self, pair: TrainingPair, context: PassContext) -> PassResult:
        """Rewrite the pair in place. May raise: the pipeline then restores both graphs."""


class JointPass(GraphPass):
    """A decision of the stage ``JOINT`` on what is saved for backward, as marks on nodes. ``run`` is not called."""

    stage: ClassVar[Stage] = Stage.JOINT

    def run(self, graph: fx.GraphModule, context: PassContext) -> PassResult:
        raise NotImplementedError(f"{self.name} works on the joint graph of a training step")

    @abstractmethod
    def wants_joint(self, graph: fx.GraphModule, options: GlueOptions) -> bool:
        """May there be anything to do for this captured graph?"""

    @abstractmethod
    def run_joint(self, joint: fx.GraphModule, num_outputs: int, context: PassContext) -> PassResult:
        """Mark nodes of ``joint``, whose first ``num_outputs`` results are the forward's."""

    def simpler(self, report: PassReport, excess: int) -> JointPass | None:
        """What to try where the marks that this one reports miss what they are for by ``excess``, or, with one of 0,
        the partitioner refuses them. None: no marks."""
        return None

    def excess(self, pair: TrainingPair, context: PassContext) -> int:
        """By how much a pair misses what the marks are for; 0: it does not. Of several the one that misses least is
        taken, and of equal ones the first."""
        return 0
