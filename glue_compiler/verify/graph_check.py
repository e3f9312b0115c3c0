"""One graph's verification: its copy from before glue, and the files that a mismatch leaves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx

from glue_compiler.errors import GlueVerifyError
from glue_compiler.fx import bodies
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.fx.effects import EffectAnalysis
from glue_compiler.graph_pass import Numerics, Stage
from glue_compiler.options import GlueOptions
from glue_compiler.report.dump import render_graph
from glue_compiler.report.replay_file import INPUTS_FILE, compose_replay
from glue_compiler.report.session import GraphReport
from glue_compiler.verify.check import Reference, verified
from glue_compiler.verify.compare import Mismatch
from glue_compiler.verify.inputs import Inputs
from glue_compiler.verify.runs import eager_reference


class GraphCheck:
    """Made before the passes run on a captured graph, and wrapped around what is compiled from it.

    Args:
        gm: the captured graph.
        report: of the graph; it has all passes by the time of a call.
        folder: of dumps, or None: files then go to a temporary folder.
    """

    def __init__(self, gm: fx.GraphModule, report: GraphReport, options: GlueOptions, folder: Path | None) -> None:
        self.graph = eager_reference(copy_graph_module(gm))
        self.report = report
        self.options = options
        self.folder = folder
        self.is_random = _draws_random_numbers(gm)
        self.texts: dict[Stage, list[str]] = {Stage.CAPTURED: [render_graph(gm)]}

    def show_after(self, whole: fx.GraphModule) -> None:
        """``whole``: the graph after the passes of the captured stage, with its prologues in front."""
        self.texts[Stage.CAPTURED].append(render_graph(whole))

    def show_pair(self, text: str) -> None:
        """Called with the training step from before the passes over it, and from after."""
        self.texts.setdefault(Stage.PARTITIONED, []).append(text)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return verified(call, Reference(self.graph, self._numerics, self.is_random, self._fail))

    def _numerics(self) -> Numerics:
        # Inductor rounds in other places when a graph is cut or fused in another way.
        exact = self.options.compiler == "aot_eager" and all(
            p.numerics is Numerics.BITWISE for p in self.report.passes if p.changed
        )
        return Numerics.BITWISE if exact else Numerics.CLOSE

    def _fail(self, found: Mismatch, inputs: Inputs) -> NoReturn:
        folder = self._write(inputs)
        changed = [p.name for p in self.report.passes if p.changed]
        raise GlueVerifyError(
            f"graph {self.report.id}: {found.name} {found.reason}. Passes that changed the graph: "
            f"{', '.join(changed) or 'none'}. Its inputs and graphs are in {folder}. To run them alone: "
            f"glue replay {folder}. To find the rewrite: glue bisect -- COMMAND"
        )

    def _write(self, inputs: Inputs) -> Path:
        if self.folder is None:
            folder = Path(tempfile.mkdtemp(prefix="glue_verify_"))
        else:
            folder = self.folder / f"graph_{self.report.id:03d}" / "verify"
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
            (place / "replay.py").write_text(text)
        return folder


def _draws_random_numbers(gm: fx.GraphModule) -> bool:
    effects = EffectAnalysis.for_graph(gm)
    return any(effects.of(module, node).random for module in bodies.graph_modules(gm) for node in module.graph.nodes)
