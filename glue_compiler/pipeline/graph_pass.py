"""The protocol between a rewrite and the pipeline that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from glue_compiler.capture.regions import Loops
from glue_compiler.pipeline.fuel import Fuel
from glue_compiler.pipeline.results import Numerics, Stage
from glue_compiler.pipeline.results import PassResult as PassResult

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.fx.effects import EffectAnalysis
    from glue_compiler.fx.training_pair import TrainingPair
    from glue_compiler.options import GlueOptions


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
        return self.effects.shape_env


class GraphPass(ABC):
    """A rewrite. Holds no state: the same object runs on many graphs, from several threads.

    A pass is on by default when ``default`` is true; ``options={"passes": {name: bool}}`` and ``GLUE_DISABLE``
    overrule it.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage] = Stage.CAPTURED
    numerics: ClassVar[Numerics]
    default: ClassVar[bool] = True
    proves_loops: ClassVar[Loops] = Loops.NONE
    """The kinds of loops that it proves, so that capture may trace them otherwise than they run."""

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
