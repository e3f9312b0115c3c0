"""Finds the single rewrite that makes a program fail, by running the program again with fewer and fewer rewrites."""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glue_compiler.compat import bisector
from glue_compiler.errors import GlueError, GlueOptionError
from glue_compiler.pipeline.results import Numerics
from glue_compiler.report.dump_folder import PROCESSES, SUMMARY
from glue_compiler.report.recorded import RecordedPass, read_folder
from glue_compiler.report.replay_file import INPUTS_FILE, compose_replay
from glue_compiler.verify.program_runs import ProgramRuns
from glue_compiler.verify.replay import REPLAY_FILE, count_inputs

# More rewrites than a compile has. With any limit nothing comes from Inductor's caches, whose graphs run no pass.
_ALL = 10**9
_LOG = "output.txt"


class NothingToFind(GlueError):
    """The program does not fail, or fails without glue's rewrites too; says what to do then."""


@dataclass(frozen=True)
class Culprit:
    """What makes the program fail.

    Attributes:
        pass_name: the pass.
        graph: the number of the graph, as in the dump.
        rewrite: the number of the single rewrite, as ``GLUE_FUEL`` counts; None: the pass does not number its rewrites.
        what: what the rewrite does.
        replay: a file that runs the graph before and after this rewrite alone; None where there is none to show.
        runs: how many times the program ran.
    """

    pass_name: str
    graph: int | None
    rewrite: int | None
    what: str
    replay: Path | None
    runs: int


def bisect(
    command: Sequence[str],
    *,
    metric: str | None = None,
    tolerance: float = 0.0,
    limit: float | None = None,
    folder: Path = Path("glue_bisect"),
    say: Callable[[str], None] = print,
) -> Culprit:
    """Find the pass, and in it the first single rewrite, with which ``command`` fails.

    The command fails when its exit code is not 0, when it takes too long, or, with ``metric``, when the number that it
    prints differs from that of a run without glue's rewrites. It must do the same in each run, and gets no
    standard input: torch's ``CompilerBisector`` halves what is left, so it takes about log2(rewrites) + 4 runs.

    Args:
        command: the program and its arguments.
        metric: a regular expression; its first group in the last match in the output is a number, such as a loss.
        tolerance: how far that number may be away.
        limit: seconds that a run may take. None: ten times the longest one before and a minute; the first has no limit.
        folder: for the outputs and dumps of all runs, and in the end ``replay.py``. What an earlier search left there
            goes.
        say: told what is done, a line at a time.

    Raises:
        NothingToFind: when all rewrites together do no harm, or none are needed for it.
        GlueOptionError: for an empty command or a regular expression without a group.
    """
    if not command:
        raise GlueOptionError("bisect needs a command to run: glue bisect -- python train.py")
    if metric is not None and re.compile(metric).groups < 1:
        raise GlueOptionError(f"the metric {metric!r} has no group: write the number in parentheses, 'loss (\\S+)'")
    return _Bisection(ProgramRuns(command, limit), metric, tolerance, folder, say).run()


def bisect_with_torch(works: Callable[[], bool]) -> Any | None:
    """Torch's own ``CompilerBisector.do_bisect``, which then searches in glue too: single rewrites, then passes.

    Use it when it is not known whether glue, Inductor or AOTAutograd is to blame.

    Args:
        works: compiles with ``torch.compile(..., backend="glue")``, after ``torch.compiler.reset()``, runs, and says
            whether the result is right. The bisector puts another backend in the place of glue while it searches there.

    Returns:
        torch's ``BisectionResult`` (``backend``, ``subsystem``, ``bisect_number``, ``debug_info``), or None.
    """
    with bisector.registered() as torchs:
        return torchs.do_bisect(works)


@dataclass(frozen=True)
class _Run:
    """One run of the program."""

    folder: Path
    code: int | None
    """None: it was ended because it took too long."""
    metric: float | None

    @functools.cached_property
    def passes(self) -> list[tuple[int, RecordedPass]]:
        """(graph, pass) in order, of the first dump that has any.

        A distributed program has a folder for each rank, and so has each of several processes that compile at the same
        time.
        """
        for place in (self.folder, self.folder / "rank_0", *sorted(self.folder.glob(PROCESSES))):
            graphs = read_folder(place).graphs if (place / SUMMARY).exists() else ()
            if found := [(graph.id, each) for graph in graphs for each in graph.passes]:
                return found
        return []

    def rewrites(self) -> list[tuple[int, RecordedPass, Mapping[str, Any]]]:
        """(graph, pass, number and text) of each single rewrite."""
        return [(graph, each, rewrite) for graph, each in self.passes for rewrite in each.entry["rewrites"]]

    def text(self, graph: int, name: str, *moments: str) -> str | None:
        """The graph as the pass left it (or found it), at the first of ``moments`` that was written."""
        files = (each.files.get(m) for m in moments for at, each in self.passes if (at, each.name) == (graph, name))
        return next((file.read_text(encoding="utf-8") for file in files if file is not None), None)


@dataclass
class _Bisection:
    program: ProgramRuns
    metric: str | None
    tolerance: float
    folder: Path
    say: Callable[[str], None]
    runs: int = 0
    good: _Run | None = None
    seen: dict[tuple[tuple[str, ...], int], _Run] = field(default_factory=dict)

    def run(self) -> Culprit:
        self._clear()
        full = self._probe("all rewrites", (), _ALL)
        passes = list(dict.fromkeys(each.name for _, each in full.passes))
        changed = list(dict.fromkeys(each.name for _, each in full.passes if each.changed))
        if not changed:
            raise NothingToFind("no pass of glue changed a graph in this program")
        self.good = self._probe("without the passes", tuple(passes), 0)
        if self.metric is not None and self.good.metric is None:
            raise NothingToFind(
                f"the run without passes prints nothing that matches {self.metric!r}: see {self._log()}"
            )
        if self._fails(self.good):
            raise NothingToFind(
                f"the program fails without glue's passes too: see {self._log()}. To search in torch: "
                "python -m torch._inductor.compiler_bisector run COMMAND, or TORCHDYNAMO_REPRO_AFTER=aot (its minifier)"
            )
        if not self._fails(full):
            raise NothingToFind("the program does not fail with all of glue's rewrites")
        count = max((rewrite["number"] for *_, rewrite in full.rewrites()), default=0)
        totals = {bisector.REWRITES: count, bisector.PASSES: len(changed)}
        found = bisector.search(functools.partial(self._works, passes, changed), totals)
        if found is None:
            raise NothingToFind("the program fails with no rewrite and no pass too, and worked with none before")
        part, number = found
        if part == bisector.PASSES:
            reason = "it does not ask context.fuel before its rewrites"
            return Culprit(changed[number - 1], None, None, reason, None, self.runs)
        return self._culprit(number)

    def _works(self, passes: Sequence[str], changed: Sequence[str], part: str, number: int) -> bool:
        """With so many of the single rewrites, or of the passes that changed something."""
        if part == bisector.REWRITES:
            return not self._fails(self._probe(f"{number} rewrites", (), number))
        on = changed[:number]
        off = tuple(name for name in passes if name not in on)
        return not self._fails(self._probe(f"passes: {', '.join(on) or 'none'}", off, _ALL))

    def _clear(self) -> None:
        """Remove what an earlier search left here, and nothing else."""
        for run in self.folder.glob("run_[0-9][0-9]"):
            shutil.rmtree(run)
        for name in (REPLAY_FILE, INPUTS_FILE):
            (self.folder / name).unlink(missing_ok=True)

    def _culprit(self, number: int) -> Culprit:
        bad, good = (self._probe(f"{n} rewrites", (), n) for n in (number, number - 1))
        found = [each for each in bad.rewrites() if each[2]["number"] == number]
        if not found:
            raise NothingToFind(
                f"rewrite {number} makes the program fail, and is not in its summary: see {self._log()}"
            )
        graph, wrong, rewrite = found[-1]  # the last graph's, where one was captured again
        name, what = wrong.name, rewrite["what"]
        before = good.text(graph, name, "whole", "after") or bad.text(graph, name, "before")
        after = bad.text(graph, name, "whole", "after")
        replay = None
        if before is not None and after is not None:
            replay = self.folder / REPLAY_FILE
            title = f"Graph {graph} before and after rewrite {number} ({name}): {what}."
            replay.write_text(compose_replay(before, after, Numerics(wrong.entry["numerics"]), title), encoding="utf-8")
            if wrong.entry["stage"] == "captured":
                self._save_inputs(number, graph, replay)
        return Culprit(name, graph, number, what, replay, self.runs)

    def _save_inputs(self, number: int, graph: int, replay: Path) -> None:
        """The inputs of a call that verification finds wrong, if it does, are better than random ones."""
        run = self._probe("verified", (), number, GLUE_VERIFY="1")
        for saved in run.folder.rglob(f"graph_{graph:03d}/verify/{INPUTS_FILE}"):
            if count_inputs(saved) == count_inputs(replay):
                shutil.copy(saved, replay.with_name(INPUTS_FILE))

    def _fails(self, run: _Run) -> bool:
        if run.code != 0 or self.metric is None or self.good is None or self.good.metric is None:
            return run.code != 0
        if run.metric is None or math.isnan(run.metric) != math.isnan(self.good.metric):
            return True
        return abs(run.metric - self.good.metric) > self.tolerance

    def _log(self) -> Path:
        return self.folder / f"run_{self.runs:02d}" / _LOG

    def _probe(self, title: str, off: tuple[str, ...], fuel: int, **more: str) -> _Run:
        key = (off, fuel)
        if key in self.seen and not more:
            return self.seen[key]
        self.runs += 1
        folder = self.folder / f"run_{self.runs:02d}"
        folder.mkdir(parents=True)
        disabled = [name for name in os.environ.get("GLUE_DISABLE", "").replace(",", " ").split() if name not in off]
        environment = {
            **os.environ,
            "GLUE_DUMP": str(folder.absolute()),
            "GLUE_FUEL": str(fuel),
            "GLUE_DISABLE": ",".join([*disabled, *off]),
            **more,
        }
        result = self.program.run(environment, folder / _LOG)
        found = re.findall(self.metric, result.output) if self.metric is not None else []
        run = self.seen[key] = _Run(folder, result.code, _number(found[-1]) if found else None)
        shown = f", {run.metric}" if run.metric is not None else ""
        end = f"exit code {run.code}" if run.code is not None else f"ended after {result.seconds:.0f} s"
        self.say(f"run {self.runs}, {title}: {end}{shown}")
        return run


def _number(match: Any) -> float | None:
    text = match[0] if isinstance(match, tuple) else match
    try:
        return float(text)
    except ValueError:
        return None
