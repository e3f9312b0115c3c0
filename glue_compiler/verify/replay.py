"""Runs dumped graphs alone: times them, and compares a graph with the one before it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
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
        GlueGraphFileError: if there is nothing to run at ``path``, or it does not run here.
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
        return [_replay_after(path, moments[0])]
    module = _module(path)
    if hasattr(module, "compare"):
        return [_replay_pair(path, module)]
    if not hasattr(module, "make_graph") or not hasattr(module, "make_modes"):
        raise GlueGraphFileError(f"{path} is no graph that glue wrote")
    torch.manual_seed(0)
    with _runs(path), module.inside(module.make_modes()):
        inputs = module.make_inputs()
        return [Replay(path, {}, {"graph": _milliseconds(lambda: module.make_graph()(*inputs))})]


def _replay_after(path: Path, stem: str) -> Replay:
    before = path.with_name(f"{stem}.before.py")
    if not before.is_file():
        raise GlueGraphFileError(f"{path.name} is compared with {before.name} beside it, which is not there")
    whole = path.with_name(f"{stem}.whole.py")  # what a split graph and its prologue compute together
    texts = [_text(file) for file in (before, whole if whole.exists() else path)]
    try:
        text = compose_replay(texts[0], texts[1], _numerics_of(path), str(path))
    except (ValueError, IndexError) as error:
        raise GlueGraphFileError(f"{path}, or the graph before, is no graph that glue wrote") from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / REPLAY_FILE
        file.write_text(text, encoding="utf-8")
        return _replay_pair(path, _module(file, path))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GlueGraphFileError(f"{file} cannot be read: {error}") from error


def count_inputs(file: Path) -> int:
    """How many inputs the graphs of a replay file take, or a file of saved inputs holds."""
    return len(torch.load(file, map_location="cpu") if file.suffix == ".pt" else _module(file).make_inputs())


def _replay_pair(file: Path, module: ModuleType) -> Replay:
    with _runs(file):
        differences = module.compare()
        if module.RAISES in differences:
            return Replay(file, differences, {})
        given = module.inputs()
        times = {
            name: _milliseconds(lambda graph=graph: module.run(graph, given))  # type: ignore[misc]
            for name, graph in (("before", module.before()), ("after", module.after()))
        }
    return Replay(file, differences, times)


@contextlib.contextmanager
def _runs(file: Path) -> Iterator[None]:
    """A file that another process wrote may not run in this one: a device or an operator that is not here."""
    try:
        yield
    except Exception as error:
        raise GlueGraphFileError(f"{file} does not run here: {type(error).__name__}: {error}") from error


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


def _module(file: Path, shown: Path | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location("glue_replayed", file)
    if spec is None or spec.loader is None:
        raise GlueGraphFileError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    with _runs(shown or file):
        spec.loader.exec_module(module)
    return module


def _numerics_of(file: Path) -> Numerics:
    """Of the pass that a dumped file is about, from the dump's summary; close, where there is none."""
    name = file.name.split(".")[0].partition("_")[2]
    try:
        summary = json.loads((file.parent.parent / "summary.json").read_text(encoding="utf-8"))
        found = {p["name"]: p["numerics"] for graph in summary["graphs"] for p in graph["passes"]}
        return Numerics(found[name])
    except (OSError, ValueError, KeyError, TypeError):
        return Numerics.CLOSE
