"""Graphs as a backend sees them, at each stage of a compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from glue_compiler.backend import GlueBackend
from glue_compiler.compat import dynamo, partition
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline import registry
from glue_compiler.pipeline.results import Stage


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
            are on have run before the partitioned graphs are taken. Graphs are whole: ``{"regions": "auto"}`` gives
            them as they are in training.
        dynamic: as for ``torch.compile``.

    Raises:
        GlueOptionError: for wrong options.
        TypeError: if ``model`` is the result of ``torch.compile``.
        ValueError: for another stage.
    """
    if dynamo.is_compiled(model):
        raise TypeError("capture takes the model itself; this one is the result of torch.compile")
    stage = Stage(stage)
    backend = _Keeper(stage)
    options = {"strict": True, **(options or {})}
    if options.get("memory_budget") is None:
        options.setdefault("regions", "whole")
    options["passes"] = {**dict.fromkeys(registry.pass_names(), False), **options.get("passes", {})}
    try:
        with torch.random.fork_rng():
            torch.compile(model, backend=backend, dynamic=dynamic, options=options)(*args, **kwargs)
    finally:
        # Each function may be compiled a limited number of times; a look at it must not use one up.
        dynamo.forget_compiled(backend.frames)
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

        return partition.compile_with_aot_eager(gm, inputs, partition.Edit(keep))


def _run_as_it_is(gm: fx.GraphModule, *_: Any) -> Callable[..., Any]:
    return gm.forward
