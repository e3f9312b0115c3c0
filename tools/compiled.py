"""Functions compiled with glue, and what became of their graphs: what tests and the fuzzer compare with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glue_compiler.backend import GlueBackend
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.handoff.hand_off import hand_off
from glue_compiler.options import GlueOptions
from glue_compiler.report.graph_report import GraphReport
from glue_compiler.report.session import Session


@dataclass
class Run:
    """A function compiled with glue, and what became of its graphs; ``graphs`` grows with each compile.

    Attributes:
        call: the compiled function.
        session: the reports.
        graphs: copies of what was handed on, after all passes of the captured stage; where memoize_metadata splits a
            graph, the prologue and then the rest.
    """

    call: Any
    session: Session
    graphs: list[fx.GraphModule] = field(default_factory=list)

    @property
    def graph(self) -> fx.GraphModule:
        """The one graph."""
        assert len(self.graphs) == 1, f"{len(self.graphs)} graphs"
        return self.graphs[0]

    @property
    def report(self) -> GraphReport:
        """The one report."""
        assert len(self.session.graphs) == 1, f"{len(self.session.graphs)} graphs were captured"
        return self.session.graphs[0]

    @property
    def counts(self) -> dict[str, int]:
        """What the first enabled pass counted."""
        return dict(self.report.passes[0].counts)

    @property
    def skip_reasons(self) -> list[str]:
        return [skip.reason for p in self.report.passes for skip in p.skips]


def compile_and_keep(
    model: Callable[..., Any],
    *,
    passes: Mapping[str, bool] | None = None,
    eager: bool = False,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    **options: Any,
) -> Run:
    """``torch.compile(model, backend="glue")``, keeping the rewritten graphs. Its results can be compared with eager.

    Args:
        passes: name → on or off; others keep their default.
        eager: run the rewritten graph as it is, without AOTAutograd.
        fullgraph, dynamic: as for ``torch.compile``.
        options: glue's other options; ``compiler`` is ``"aot_eager"``, and ``strict`` is on, unless they say otherwise.
    """
    kept = Run(None, Session())

    def keep(
        gm: fx.GraphModule, inputs: Sequence[Any], glue_options: GlueOptions, uuid: bytes | None, edit_pair: Any = None
    ) -> Callable[..., Any]:
        kept.graphs.append(copy_graph_module(gm))
        return gm.forward if eager else hand_off(gm, inputs, glue_options, uuid, edit_pair)

    backend = GlueBackend(hand_off=keep, session=kept.session)
    options = {"compiler": "aot_eager", "strict": True, **options, "passes": dict(passes or {})}
    kept.call = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic, options=options)
    return kept
