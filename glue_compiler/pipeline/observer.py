"""What is told about a graph on its way through a compile, to those who report it, dump it or verify it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from glue_compiler.errors import GlueWarning

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.fx.training_pair import TrainingPair
    from glue_compiler.pipeline.results import PassReport, Prologue

log = logging.getLogger(__name__)

Call = Callable[..., Any]


class Observer:
    """Follows one graph from its capture to the calls of what it became; reads, and changes nothing.

    Graphs are shown as they are at that moment: who needs one later copies it, or renders it, at once. The methods are
    called in the order in which they stand here.
    """

    name = "observer"

    def captured(self, gm: fx.GraphModule) -> None:
        """``gm`` as Dynamo made it."""

    def pass_finished(self, report: PassReport, graph: fx.GraphModule | TrainingPair) -> None:
        """A pass ran, or failed; ``graph`` is what it left. Passes over a pair come after :meth:`partitioned`."""

    def handed_off(self, gm: fx.GraphModule, prologues: Sequence[Prologue]) -> None:
        """The captured stage is over, and ``gm`` and its prologues are what will be compiled."""

    def partitioned(self, pair: TrainingPair) -> None:
        """``pair`` as AOTAutograd made it, before the passes over it. Not for every graph."""

    def pair_finished(self, pair: TrainingPair) -> None:
        """The passes over the pair are done."""

    def refused(self, passes: Sequence[str], reason: str) -> None:
        """The compiler failed on what these passes over the pair made, and it is left out."""

    def compiled(self, call: Call) -> Call:
        """``call`` is what the graph became; what is returned, ``call`` or a watch over it, takes its place."""
        return call


class Observers(Observer):
    """Tells each of ``observers`` in turn. One that fails hears no more of this graph: no compile ends with it."""

    name = "observers"

    def __init__(self, *observers: Observer) -> None:
        self._observers = list(observers)

    def compiled(self, call: Call) -> Call:
        def watch(each: Observer) -> None:
            nonlocal call
            call = each.compiled(call)

        self._tell(watch)
        return call

    def _tell(self, event: Callable[[Observer], None]) -> None:
        self._observers = [each for each in self._observers if _has_heard(each, event)]


def _telling(event: str) -> Callable[..., None]:
    def tell(self: Observers, *what: Any) -> None:
        self._tell(lambda each: getattr(each, event)(*what))

    return tell


for _event in (
    "captured",
    "pass_finished",
    "handed_off",
    "partitioned",
    "pair_finished",
    "refused",
):
    setattr(Observers, _event, _telling(_event))


def _has_heard(observer: Observer, event: Callable[[Observer], None]) -> bool:
    try:
        event(observer)
    except Exception as error:
        log.debug("%s failed", observer.name, exc_info=True)
        warnings.warn(
            f"glue's {observer.name} of a graph is not complete ({type(error).__name__}: {error}); "
            "the compile goes on without it",
            GlueWarning,
            stacklevel=4,
        )
        return False
    return True
