"""``explain``: what glue would do to a model, without training it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler.backend import GlueBackend
from glue_compiler.capture import CaptureEvent
from glue_compiler.cli.explanation_text import explanation_lines
from glue_compiler.compat import dynamo, partition
from glue_compiler.options import GlueOptions
from glue_compiler.report.graph_report import GraphReport
from glue_compiler.report.session import Session


@dataclass(frozen=True)
class Explanation:
    """What glue found and did. ``str()`` of it is a report for people.

    Attributes:
        graphs: one report for each captured graph: passes, counts, skips, host syncs that remain, and the graph
            break that it ends at.
        capture: frames that were captured in a second try, or left to eager.
    """

    graphs: tuple[GraphReport, ...]
    capture: tuple[CaptureEvent, ...]

    @property
    def graph_breaks(self) -> list[tuple[str, str]]:
        """(reason, user's line) of each."""
        return [graph.graph_break for graph in self.graphs if graph.graph_break]

    def __str__(self) -> str:
        return "\n".join(explanation_lines(self.graphs, self.capture))


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """Capture ``model(*args, **kwargs)``, run glue's passes on the graphs, and report.

    The model runs forward once, in eager operators, with the state of the random generators put back afterwards;
    nothing is compiled to code, no backward runs, and parameters keep their gradients. What the model itself changes
    in forward (running statistics, caches) is changed.

    Args:
        model: a module or function, not compiled yet.
        options: as for ``torch.compile(..., backend="glue", options=...)``.

    Raises:
        GlueOptionError: for wrong options.
        TypeError: if ``model`` is the result of ``torch.compile``.
    """
    if dynamo.is_compiled(model):
        raise TypeError("explain takes the model itself; this one is the result of torch.compile")
    session = Session()
    backend = GlueBackend(hand_off=_run_eagerly, session=session)
    try:
        with torch.random.fork_rng():
            torch.compile(model, backend=backend, options=dict(options) if options else None)(*args, **kwargs)
    finally:
        # Each function may be compiled a limited number of times; a look at it must not use one up.
        dynamo.forget_compiled(backend.frames)
    return Explanation(tuple(session.graphs), tuple(session.capture_events))


def _run_eagerly(
    gm: fx.GraphModule, inputs: Sequence[Any], _: GlueOptions, __: bytes | None, edit_pair: partition.Edit | None = None
) -> Callable[..., Any]:
    return gm.forward if edit_pair is None else partition.compile_with_aot_eager(gm, inputs, edit_pair)
