"""What passes did to a training step, in the form in which it is stored with the compiled step."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import pickle
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from glue_compiler.compat import layers
from glue_compiler.errors import GlueWarning
from glue_compiler.fuel import RewriteCounter
from glue_compiler.fx import bodies
from glue_compiler.observer import Observer
from glue_compiler.pipeline import PassReport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShownPass:
    """``texts``: the graph around a pass that changed it, by moment: before, after, prologue, and both as a whole."""

    report: PassReport
    texts: Mapping[str, str]


@dataclass(frozen=True)
class KeptStep:
    """The passes over a joint graph, and over the forward and the backward graph that it became, in order."""

    passes: tuple[ShownPass, ...]

    def to_bytes(self) -> bytes:
        # A text that is one pass's "after" and the next one's "before" is one object, which pickle writes once.
        return zlib.compress(pickle.dumps(self), 1)

    @classmethod
    def from_bytes(cls, record: bytes) -> KeptStep:
        """
        Raises:
            Exception: whatever the bytes lead to, if they are not what :meth:`to_bytes` made.
        """
        found = pickle.loads(zlib.decompress(record))
        if not isinstance(found, cls):
            raise TypeError(f"a {type(found).__name__} is no record of a step")
        return found

    def numbered(self, counter: RewriteCounter) -> KeptStep:
        """With the numbers that its rewrites have in this process."""
        with counter.lock:
            return KeptStep(
                tuple(
                    dataclasses.replace(
                        each,
                        report=dataclasses.replace(
                            each.report, rewrites=tuple(counter.number(r.what) for r in each.report.rewrites)
                        ),
                    )
                    for each in self.passes
                )
            )


class StepMemory:
    """Has what is reported of a training step stored with it, and tells it to ``observer`` when a cache has the step.

    Args:
        finished: the step whose passes are done; None if it is not known what they did.
    """

    def __init__(self, finished: Callable[[], KeptStep | None], observer: Observer, counter: RewriteCounter) -> None:
        self._finished, self._observer, self._counter = finished, observer, counter

    def record(self) -> bytes | None:
        step = self._finished()
        # Where a pass failed, each process is to be warned, or to raise with ``strict``.
        if step is None or any(each.report.error is not None for each in step.passes):
            return None
        try:
            return step.to_bytes()
        except Exception as error:
            warnings.warn(
                f"what passes report of a training step cannot be stored ({type(error).__name__}: {error}); with a "
                "dump it is compiled in each process",
                GlueWarning,
                stacklevel=2,
            )
            return None

    def restore(self, record: bytes | None) -> bool:
        try:
            step = KeptStep.from_bytes(record or b"")
        except Exception:
            log.debug("a step from the cache is compiled again: its record cannot be read", exc_info=True)
            return False
        self._observer.restored(step.numbered(self._counter))
        return True


def origins(gm: fx.GraphModule) -> bytes:
    """A hash of the source lines and layers of all nodes: a dump shows them, and no cache's key knows them."""
    found = hashlib.sha256()
    for module in bodies.graph_modules(gm):
        for node in module.graph.nodes:
            found.update(f"{node.name}\0{node.stack_trace}\0{layers.layer_of(node)}\0".encode(errors="replace"))
    return found.digest()
