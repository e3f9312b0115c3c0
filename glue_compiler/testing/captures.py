"""Graphs as a backend sees them, at each stage of a compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import fx

from glue_compiler import compat, registry
from glue_compiler.backend import GlueBackend
from glue_compiler.compat import partition
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.graph_pass import Stage
from glue_compiler.handoff import hand_off
from glue_compiler.options import GlueOptions
from glue_compiler.report.graph_report import GraphReport
from glue_compiler.report.session import Session


@overload
def capture(
    model: Callable[..., Any],
    *args: Any,
    stage: Literal[Stage.CAPTURED, "captured"] = "captured",
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> list[fx.GraphModule]: ...
@overload
def capture(
    model: Callable[..., Any],
    *args: Any,
    stage: Literal[Stage.PARTITIONED, "partitioned"],
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> list[TrainingPair]: ...


def capture(
    model: Callable[..., Any],
    *args: Any,
    stage: Stage | str = "captured",
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> list[Any]:
    """The graphs of ``model(*args, **kwargs)`` before any pass has seen them, in the order of their compiles.

    The model runs forward once, in eager operators, with the state of the random generators put back afterwards.

    Args:
        model: a module or function, not compiled yet.
        stage: ``"captured"``: Dynamo's graphs, each a GraphModule; a graph break gives several. ``"partitioned"``: the
            forward and the backward graph of each, as a :class:`TrainingPair`; only graphs with something to
            differentiate have one.
        options: glue's options. All passes are off unless ``passes`` says otherwise; those of the captured stage that
            are on have run before the partitioned graphs are taken.
        dynamic: as for ``torch.compile``.

    Raises:
        GlueOptionError: for wrong options.
        TypeError: if ``model`` is the result of ``torch.compile``.
        ValueError: for another stage.
    """
    if compat.is_compiled(model):
        raise TypeError("capture takes the model itself; this one is the result of torch.compile")
    stage = Stage(stage)
    if stage is Stage.JOINT:
        raise ValueError("the joint graph is not captured; take 'captured' or 'partitioned'")
    backend = _Keeper(stage)
    options = {"strict": True, **(options or {})}
    options["passes"] = {**dict.fromkeys(registry.pass_names(), False), **options.get("passes", {})}
    try:
        with torch.random.fork_rng():
            torch.compile(model, backend=backend, dynamic=dynamic, options=options)(*args, **kwargs)
    finally:
        # Each function may be compiled a limited number of times; a look at it must not use one up.
        compat.forget_compiled(backend.frames)
    return backend.graphs


class _Keeper(GlueBackend):
    def __init__(self, stage: Stage) -> None:
        super().__init__(hand_off=self._keep_pairs if stage is Stage.PARTITIONED else _run_as_it_is)
        self.stage = stage
        self.graphs: list[Any] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        before = len(self.graphs)
        if self.stage is Stage.CAPTURED:
            self.graphs.append(copy_graph_module(gm))
        try:
            return super().__call__(gm, example_inputs, **kwargs)
        except BaseException:  # Dynamo tries the frame again, in another way
            del self.graphs[before:]
            raise

    def _keep_pairs(
        self, gm: fx.GraphModule, inputs: Sequence[Any], options: GlueOptions, uuid: bytes | None, edit: Any = None
    ) -> Callable[..., Any]:
        def keep(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
            if edit is not None:
                edit.pair(forward, backward, num_outputs)
            self.graphs.append(TrainingPair(copy_graph_module(forward), copy_graph_module(backward), num_outputs))

        return partition.compile_with_aot_eager(gm, inputs, partition.Edit(keep, edit and edit.joint))


def _run_as_it_is(gm: fx.GraphModule, *_: Any) -> Callable[..., Any]:
    return gm.forward


@dataclass
class Capture:
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
) -> Capture:
    """``torch.compile(model, backend="glue")``, keeping the rewritten graphs. Its results can be compared with eager.

    Args:
        passes: name → on or off; others keep their default.
        eager: run the rewritten graph as it is, without AOTAutograd.
        fullgraph, dynamic: as for ``torch.compile``.
        options: glue's other options; ``compiler`` is ``"aot_eager"``, and ``strict`` is on, unless they say otherwise.
    """
    kept = Capture(None, Session())

    def keep(
        gm: fx.GraphModule, inputs: Sequence[Any], glue_options: GlueOptions, uuid: bytes | None, edit_pair: Any = None
    ) -> Callable[..., Any]:
        kept.graphs.append(copy_graph_module(gm))
        return gm.forward if eager else hand_off(gm, inputs, glue_options, uuid, edit_pair)

    backend = GlueBackend(hand_off=keep, session=kept.session)
    options = {"compiler": "aot_eager", "strict": True, **options, "passes": dict(passes or {})}
    kept.call = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic, options=options)
    return kept
