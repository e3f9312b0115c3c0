"""Runs dumped graphs alone, and compares a graph with the one before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from glue_compiler.errors import GlueGraphFileError
from glue_compiler.pipeline.results import Numerics
from glue_compiler.report.graph_text import DumpError
from glue_compiler.report.recorded import read_folder
from glue_compiler.report.replay_file import compose_replay

REPLAY_FILE = "replay.py"


@dataclass(frozen=True)
class Replay:
    """What running one file showed.

    Attributes:
        file: what was run.
        differences: result → how it differs from the graph before; empty where both agree.
        is_compared: two graphs were run, and not one alone.
    """

    file: Path
    differences: Mapping[str, str]
    is_compared: bool = True


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
            if next(path.rglob("*.after.py"), None) is not None:
                raise GlueGraphFileError(f"{path} is a dump: name one of its graphs, such as graph_000/01_....after.py")
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
        module.make_graph()(*module.make_inputs())
        return [Replay(path, {}, is_compared=False)]


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
    return _replay_pair(path, _module(path, text))


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
        return Replay(file, module.compare())


@contextlib.contextmanager
def _runs(file: Path) -> Iterator[None]:
    """A file that another process wrote may not run in this one: a device or an operator that is not here."""
    try:
        yield
    except Exception as error:
        raise GlueGraphFileError(f"{file} does not run here: {type(error).__name__}: {error}") from error


def _module(file: Path, text: str | None = None) -> ModuleType:
    """What ``text``, by default that of the file, defines."""
    module = ModuleType("glue_replayed")
    module.__file__ = str(file)
    with _runs(file):
        exec(compile(file.read_bytes() if text is None else text, file, "exec"), vars(module))
    return module


def _numerics_of(file: Path) -> Numerics:
    """Of the pass that a dumped file is about, from the dump's summary; close, where there is none."""
    try:
        graphs = read_folder(file.parent.parent).graphs
    except DumpError:
        return Numerics.CLOSE
    found = (each for graph in graphs for each in graph.passes if file in each.files.values())
    return next((Numerics(each.entry["numerics"]) for each in found), Numerics.CLOSE)
