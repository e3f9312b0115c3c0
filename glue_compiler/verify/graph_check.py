"""One graph's verification: its copy from before glue, and the files that a mismatch leaves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx

from glue_compiler.deferred.joined import join_deferred
from glue_compiler.errors import GlueVerifyError
from glue_compiler.fx import bodies
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.fx.training_pair import TrainingPair
from glue_compiler.options import GlueOptions
from glue_compiler.pipeline.observer import Observer
from glue_compiler.pipeline.prologues import join_prologues
from glue_compiler.pipeline.results import Numerics, Prologue, Stage
from glue_compiler.report.dump import render_graph, render_pair
from glue_compiler.report.dump_folder import DumpFolder
from glue_compiler.report.graph_report import GraphReport
from glue_compiler.report.replay_file import INPUTS_FILE, compose_replay
from glue_compiler.verify.check import Reference, verified
from glue_compiler.verify.compare import Mismatch
from glue_compiler.verify.inputs import Inputs
from glue_compiler.verify.runs import eager_reference


class GraphCheck(Observer):
    """Keeps a graph as it was captured, and checks each call of what it became against that.

    Args:
        report: of the graph; it has all passes by the time of a call.
        folder: of dumps, or None: files then go to a temporary folder.
    """

    name = "verification"

    def __init__(self, report: GraphReport, options: GlueOptions, folder: DumpFolder | None) -> None:
        self.report = report
        self.options = options
        self.folder = folder
        self.texts: dict[Stage, list[str]] = {Stage.CAPTURED: [], Stage.PARTITIONED: []}

    def captured(self, gm: fx.GraphModule) -> None:
        self.graph = eager_reference(copy_graph_module(gm))
        self.is_random = _draws_random_numbers(gm)
        self.texts[Stage.CAPTURED].append(render_graph(gm))

    def handed_off(self, gm: fx.GraphModule, prologues: Sequence[Prologue]) -> None:
        deferred = [each for p in self.report.passes for each in p.deferred]
        self.texts[Stage.CAPTURED].append(render_graph(join_deferred(join_prologues(gm, prologues), deferred)))

    def partitioned(self, pair: TrainingPair) -> None:
        self.texts[Stage.PARTITIONED].append(render_pair(pair))

    def pair_finished(self, pair: TrainingPair) -> None:
        self.texts[Stage.PARTITIONED].append(render_pair(pair))

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return verified(call, Reference(self.graph, self._numerics, self.is_random, self._fail))

    def _numerics(self) -> Numerics:
        # Inductor rounds in other places when a graph is cut or fused in another way.
        exact = self.options.compiler == "aot_eager" and all(
            p.numerics is Numerics.BITWISE for p in self.report.passes if p.changed
        )
        return Numerics.BITWISE if exact else Numerics.CLOSE

    def _fail(self, found: Mismatch, inputs: Inputs) -> NoReturn:
        changed = [p.name for p in self.report.passes if p.changed]
        try:
            folder = self._write(inputs)
            files = f"Its inputs and graphs are in {folder}. To run them alone: glue replay {folder}."
        except (OSError, RuntimeError) as error:  # torch.save raises either
            files = f"Its inputs and graphs could not be written ({error})."
        raise GlueVerifyError(
            f"graph {self.report.id}: {found.name} {found.reason}. Passes that changed the graph: "
            f"{', '.join(changed) or 'none'}. {files} To find the rewrite: glue bisect -- COMMAND"
        )

    def _write(self, inputs: Inputs) -> Path:
        dump = self.folder.path if self.folder is not None else None
        if dump is None:
            folder = Path(tempfile.mkdtemp(prefix="glue_verify_"))
        else:
            folder = dump / f"graph_{self.report.id:03d}" / "verify"
            folder.mkdir(parents=True, exist_ok=True)
        arguments, _ = inputs.arguments()
        kept = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in arguments]
        torch.save(kept, folder / INPUTS_FILE)
        for stage, texts in self.texts.items():
            passes = [p for p in self.report.passes if p.changed and p.stage is stage]
            if not passes or len(texts) != 2:
                continue
            exact = all(p.numerics is Numerics.BITWISE for p in passes)
            title = f"Graph {self.report.id} before and after {', '.join(p.name for p in passes)}."
            text = compose_replay(texts[0], texts[1], Numerics.BITWISE if exact else Numerics.CLOSE, title)
            # The inputs of a training step are others than those of the captured graph.
            place = folder if stage is Stage.CAPTURED else folder / stage.value
            place.mkdir(exist_ok=True)
            (place / "replay.py").write_text(text, encoding="utf-8", errors="backslashreplace")
        return folder


def _draws_random_numbers(gm: fx.GraphModule) -> bool:
    effects = EffectAnalysis.for_graph(gm)
    return any(effects.of(module, node).random for module in bodies.graph_modules(gm) for node in module.graph.nodes)
