"""What passes say of a graph, as plain data."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from glue_compiler.fx.values import source_line

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.capture.regions import SpeculativeRegion
    from glue_compiler.deferred.outputs import DeferredOutput
    from glue_compiler.ops.known_masks import MaskKind
    from glue_compiler.pipeline.fuel import Rewrite


class Stage(enum.Enum):
    """When in a compile a pass runs."""

    CAPTURED = "captured"
    """On Dynamo's graph, before AOTAutograd: torch-level operators, higher-order operators with bodies."""
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

    @classmethod
    def at(cls, node: fx.Node, reason: str) -> Skip:
        return cls(reason, node.name, source_line(node))


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
    ``relies_on``: the inputs of which the graph is right, or best, only as long as the same is known of them as masks.
    ``returned_masks``: what is proved of masks that the graph returns, by their positions in what it returned before,
    and a number that is equal for those that hide the same padding.
    ``under_one_mask``: a mask, or zeros for what one hides, and inputs that it is right of only as long as they are not
    zeros for what another one hides.
    ``returned_tokens``: positions of results ``[B, T, ...]`` that are zeros for tokens that a mask hides → that of the
    input that is this mask, or that is zeros for those that its own mask hides.
    """

    changed: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    skips: tuple[Skip, ...] = ()
    prologue: Prologue | None = None
    proved: tuple[SpeculativeRegion, ...] = ()
    deferred: tuple[DeferredOutput, ...] = ()
    relies_on: tuple[fx.Node, ...] = ()
    under_one_mask: tuple[fx.Node, ...] = ()
    returned_masks: Mapping[int, tuple[MaskKind, int]] = field(default_factory=dict)
    returned_tokens: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PassReport(PassResult):
    """What one pass did to one graph."""

    name: str
    stage: Stage
    numerics: Numerics
    rewrites: tuple[Rewrite, ...] = ()
    milliseconds: float = 0.0
    error: str | None = None
