"""Changes captured graphs at random, runs one pass on each, and compares what both compute."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from torch import fx

from glue_compiler.compat.switches import modes_restored
from glue_compiler.deferred.joined import join_deferred
from glue_compiler.fx.copying import copy_graph_module
from glue_compiler.options import parse_options
from glue_compiler.pipeline import registry
from glue_compiler.pipeline.prologues import join_prologues
from glue_compiler.pipeline.results import PassReport, Stage
from glue_compiler.pipeline.run import Pipeline
from tools.fuzz import harness
from tools.fuzz.check import NotAProgram, quiet_and_frozen, verdict
from tools.fuzz.failures import Failure, examined, kind_of
from tools.fuzz.graph_text import program_of
from tools.fuzz.graphs import CannotRecord, Template, draw_template, record_values, run_graph
from tools.fuzz.mutations import mutate
from tools.fuzz.script import script_of
from tools.fuzz.tally import Reporter, Settings, Tally

PASSES = {
    "attention": ("specialize_attention",) * 5 + ("hoist_metadata", "memoize_metadata"),
    "experts": ("group_experts",) * 4 + ("hoist_metadata",),
    "layers": ("hoist_metadata",),
    "losses": ("chunk_loss",),
    "metadata": ("hoist_metadata", "memoize_metadata"),
}
"""The passes that have something to find in templates of each kind, as often as they are drawn."""
MUTANTS = 25
"""Graphs made of each template."""
FEW = 4
"""So many, if the pass rewrote none of them."""


_SAVED = "has been modified by an inplace operation"


@dataclass(frozen=True)
class Checked:
    """One graph and what a pass made of it: differences, in words, and how many rewrites."""

    wrong: list[str]
    rewrites: int
    looked_at: bool


def run_graphs(settings: Settings, reporter: Reporter) -> Tally:
    """Graphs until the time is over; none of kinds whose passes all come behind the captured graph."""
    quiet_and_frozen()
    tally = Tally("graphs")
    kinds = [kind for kind in settings.kinds if kind in PASSES]
    if not kinds:
        return tally
    start = time.monotonic()
    number = settings.first - 1
    while not settings.is_over(start, tally.ran):
        number += 1
        reporter.on_progress(number, tally)
        random = Random(f"{settings.seed}/graphs/{number}")
        kind = kinds[number % len(kinds)]
        try:
            template = draw_template(random, kind, settings.device)
        except NotAProgram:
            tally.of_kind["drawn", kind] += 1
            tally.refuse(kind)
            continue
        passes: list[str | None] = [name for name in PASSES[kind] if settings.only in (None, name)] or [settings.only]
        name = random.choice(passes)
        rewritten = tally.rewritten
        for mutant in range(MUTANTS):
            if settings.is_over(start, tally.ran) or (mutant == FEW and tally.rewritten == rewritten):
                break
            _one(template, f"{number}/{mutant}", str(name), tally, settings, reporter)
    tally.seconds = time.monotonic() - start
    return tally


def _mutant(template: Template, random: Random) -> fx.GraphModule:
    gm = copy_graph_module(template.graph)
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        mutate(gm, random)
    return gm


def _one(template: Template, graph: str, name: str, tally: Tally, settings: Settings, reporter: Reporter) -> None:
    seed = f"{settings.seed}/graphs/{graph}"
    tally.of_kind["drawn", template.kind] += 1
    try:
        found = checked(template, _mutant(template, Random(seed)), name)
    except (CannotRecord, NotAProgram):
        tally.refuse(template.kind)
        return
    tally.count(template.kind, {name: found.rewrites} if found.rewrites else {}, {name} if found.looked_at else set())
    tally.of_kind["failed", template.kind] += bool(found.wrong)
    if found.wrong and reporter.is_new(f"{name} {kind_of(found.wrong)}"):
        origin = f"seed {settings.seed}, graph {graph}"
        again = _mutant(template, Random(seed))
        reporter.add(_failure(template, again, name, found.wrong, settings, origin), tally)
    elif found.wrong:
        tally.repeats += 1


def checked(template: Template, gm: fx.GraphModule, name: str) -> Checked:
    """Run the pass ``name`` on ``gm``, in place, and compare.

    Raises:
        NotAProgram, CannotRecord: if the graph fails before the pass.
    """
    with contextlib.ExitStack() as stack:
        for setting in template.settings:
            stack.enter_context(setting())
        return _compared(template, gm, name)


def _compared(template: Template, gm: fx.GraphModule, name: str) -> Checked:
    before = _module(template, copy_graph_module(gm))
    expected = harness.observe(before)  # before fake tensors see it: setitem of a fake tensor of no dimension crashes
    if errors := [value for label, value in expected.items() if label.endswith(": error")]:
        raise NotAProgram(errors[0])
    record_values(gm, template.inputs(1), template.is_symbolic)
    try:
        report = _run_pass(gm, name)
    except Exception as error:
        return Checked([f"warnings: {name} failed: {type(error).__name__}: {error}"], 0, True)
    if not report.changed:
        return Checked([], 0, bool(report.skips))
    after = gm if report.prologue is None else join_prologues(gm, [report.prologue])
    after = join_deferred(after, report.deferred)
    actual = harness.observe(_module(template, after))
    return Checked(harness.differences(before, expected, actual), max(1, len(report.rewrites)), True)


def _run_pass(gm: fx.GraphModule, name: str) -> PassReport:
    """As :func:`glue_compiler.testing.run_pass`, without the texts of the graph, which take longer than the pass."""
    known = {each.name: each for each in registry.all_passes()}
    graph_pass = known[name] if name in known else registry.resolve_pass(name)
    options = parse_options({"strict": True, "compiler": "aot_eager"}, None, [graph_pass.name], environment={})
    (report,) = Pipeline.of_one(graph_pass, options).run(gm, Stage.CAPTURED)
    return report


def _module(template: Template, gm: fx.GraphModule) -> dict[str, Any]:
    """A graph as :mod:`harness` takes programs."""
    calls: Sequence[Any] = [("fresh", seed, contextlib.nullcontext) for seed in (1, 2)]
    made = {
        "SETTINGS": [],  # those of the template are entered around all of it
        "TAKES": [],
        "LATE": False,
        "in_loss": lambda i, out: True,
        "step": lambda value, gradient: None,
        "NAN_MAY_VANISH": template.program.nan_may_vanish,
        "SPOILED": False,  # inputs are those of the template
        "make": template.inputs,
        "f": run_graph(gm),
        "between": lambda outputs, inputs: None,
        "CALLS": calls,
        "COMPILED": [],
    }
    return {**made, "PRECISION": _precision(template, gm), "ZERO_FOR_NONE": template.program.zero_for_none}


def _precision(template: Template, gm: fx.GraphModule) -> str:
    """Of the least precise arithmetic: what rounds logits, or their probabilities, may be left out."""
    graphs = [str(module.graph) for module in gm.modules() if isinstance(module, fx.GraphModule)]
    is_low = any(name in text for text in graphs for name in ("half", "float16", "float32", "float]"))
    return "bfloat16" if template.kind == "losses" and is_low else template.program.precision


def _failure(
    template: Template, gm: fx.GraphModule, name: str, wrong: list[str], settings: Settings, origin: str
) -> Failure | None:
    """As a program through Dynamo, if it is wrong there too; else the graph as it is."""
    program = program_of(gm, template)
    kind = f"{name} | {kind_of(wrong)}"
    try:
        with modes_restored():  # as a program the graph leaves the modes that it has switched
            found = verdict(program)
            if found.wrong:
                return examined(program, found.wrong, settings.shrink_seconds, origin)
        if any(_SAVED in difference for difference in wrong):
            return None  # AOTAutograd writes no memory in place: the check cannot fail in what it compiles
        note = "wrong as a graph; right when it is compiled"
    except NotAProgram as error:
        note = f"wrong as a graph; as a program it fails in eager code: {error}"
    return Failure(name, f"graph only: {kind}", tuple(wrong), script_of(program, wrong, f"{origin}; {note}"), origin)
