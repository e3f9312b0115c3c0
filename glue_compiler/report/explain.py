"""``explain``: what glue would do to a model, without training it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glue_compiler import compat
from glue_compiler.backend import GlueBackend
from glue_compiler.capture import CaptureEvent
from glue_compiler.compat import partition
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
        return "\n".join(_lines(self))


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
    if compat.is_compiled(model):
        raise TypeError("explain takes the model itself; this one is the result of torch.compile")
    session = Session()
    backend = GlueBackend(hand_off=_run_eagerly, session=session)
    try:
        with torch.random.fork_rng():
            torch.compile(model, backend=backend, options=dict(options) if options else None)(*args, **kwargs)
    finally:
        # Each function may be compiled a limited number of times; a look at it must not use one up.
        compat.forget_compiled(backend.frames)
    return Explanation(tuple(session.graphs), tuple(session.capture_events))


def _run_eagerly(
    gm: fx.GraphModule, inputs: Sequence[Any], _: GlueOptions, __: bytes | None, edit_pair: partition.Edit | None = None
) -> Callable[..., Any]:
    return gm.forward if edit_pair is None else partition.compile_with_aot_eager(gm, inputs, edit_pair)


def _lines(explanation: Explanation) -> list[str]:
    graphs, breaks = explanation.graphs, explanation.graph_breaks
    lines = [f"{len(graphs)} graph(s), {len(breaks)} graph break(s), torch {torch.__version__}"]
    for graph in graphs:
        lines.append(f"\ngraph {graph.id}: {graph.nodes_before} → {graph.nodes_after} nodes")
        for p in graph.passes:
            done = ", ".join(f"{name} {count}" for name, count in p.counts.items()) or "nothing to do"
            lines.append(f"  {p.name}: {p.error or done} ({p.milliseconds:.0f} ms)")
            lines += [f"    left alone: {_in(skip.node)}{skip.reason}{_at(skip.source)}" for skip in p.skips]
        for sync in graph.host_syncs:
            when = "once per batch" if sync.once_per_batch else "that remains"
            lines.append(f"  host sync {when}: {sync.target}{_at(sync.source)}")
        if graph.graph_break:
            reason, source = graph.graph_break
            lines.append(f"  ends at a graph break: {reason.splitlines()[0]}{_at(source)}")
    if explanation.capture:
        lines.append("\ncapture:")
    for event in explanation.capture:
        outcome = "captured again without data-dependent values" if event.retried else "left to eager"
        lines.append(f"  a frame was {outcome}: {event.reason}")
    return lines


def _in(node: str) -> str:
    return f"{node}: " if node else ""


def _at(source: str) -> str:
    return f" ({source})" if source else ""
