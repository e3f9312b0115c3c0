"""Runs dumped graphs alone: times them, and compares a graph with the one before it."""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from glue_compiler.errors import GlueGraphFileError
from glue_compiler.graph_pass import Numerics
from glue_compiler.report.replay_file import compose_replay

REPLAY_FILE = "replay.py"
_RUNS = 5


@dataclass(frozen=True)
class Replay:
    """What running one file showed.

    Attributes:
        file: what was run.
        differences: result → how it differs from the graph before; empty where both agree.
        milliseconds: of one run, forward and backward in eager operators, the median of a few; by ``"before"`` and
            ``"after"``, or ``"graph"`` where there is one alone.
    """

    file: Path
    differences: Mapping[str, str]
    milliseconds: Mapping[str, float]


def replay(path: Path) -> list[Replay]:
    """Run a dumped graph, a replay file, or all replay files in the folder of a failed verification.

    Inputs are those saved beside a replay file, or random ones of the recorded shapes. ``X.after.py`` is compared with
    ``X.before.py`` beside it.

    Raises:
        GlueGraphFileError: if there is nothing to run at ``path``.
    """
    if path.is_dir():
        found = sorted(path.rglob(REPLAY_FILE), key=lambda file: len(file.parts))
        if not found:
            raise GlueGraphFileError(f"{path} holds no {REPLAY_FILE}: no pass changed the graph that it is about")
        return [_replay_pair(file, _module(file)) for file in found]
    if not path.is_file():
        raise GlueGraphFileError(f"there is no file {path}")
    moments = path.name.split(".")
    if len(moments) == 3 and moments[1] in ("after", "whole"):
        before = path.with_name(f"{moments[0]}.before.py")
        after = path.with_name(f"{moments[0]}.whole.py")  # what a split graph and its prologue compute together
        text = compose_replay(
            before.read_text(), (after if after.exists() else path).read_text(), _numerics_of(path), str(path)
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / REPLAY_FILE
            file.write_text(text)
            return [_replay_pair(path, _module(file))]
    module = _module(path)
    if hasattr(module, "compare"):
        return [_replay_pair(path, module)]
    if not hasattr(module, "make_graph"):
        raise GlueGraphFileError(f"{path} is no graph that glue wrote")
    torch.manual_seed(0)
    inputs = module.make_inputs()
    return [Replay(path, {}, {"graph": _milliseconds(lambda: module.make_graph()(*inputs))})]


def count_inputs(file: Path) -> int:
    """How many inputs the graphs of a replay file take, or a file of saved inputs holds."""
    return len(torch.load(file, map_location="cpu") if file.suffix == ".pt" else _module(file).make_inputs())


def _replay_pair(file: Path, module: ModuleType) -> Replay:
    differences = module.compare()
    given = module.inputs()
    times = {
        name: _milliseconds(lambda graph=graph: module.run(graph, given))  # type: ignore[misc]
        for name, graph in (("before", module.before()), ("after", module.after()))
    }
    return Replay(file, differences, times)


def _milliseconds(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(_RUNS):
        _wait_for_devices()
        start = time.perf_counter()
        call()
        _wait_for_devices()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def _wait_for_devices() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("glue_replayed", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _numerics_of(file: Path) -> Numerics:
    """Of the pass that a dumped file is about, from the dump's summary; close, where there is none."""
    name = file.name.split(".")[0].partition("_")[2]
    try:
        summary = json.loads((file.parent.parent / "summary.json").read_text())
        found = {p["name"]: p["numerics"] for graph in summary["graphs"] for p in graph["passes"]}
        return Numerics(found[name])
    except (OSError, ValueError, KeyError):
        return Numerics.CLOSE
