"""Levels for the fuzzer's workers, which are processes and import this."""

from __future__ import annotations

import os

from glue_compiler.pipeline.graph_pass import GraphPass, PassResult
from glue_compiler.pipeline.results import Numerics
from glue_compiler.testing import find
from tools.fuzz.tally import Reporter, Settings, Tally

COUNT = 6


def runs(settings: Settings, reporter: Reporter) -> Tally:
    return _run(settings, reporter, {})


def dies(settings: Settings, reporter: Reporter) -> Tally:
    return _run(settings, reporter, {2: lambda: os._exit(3), 4: lambda: [].pop()})


def dies_at_once(settings: Settings, reporter: Reporter) -> Tally:
    raise RuntimeError


def _run(settings: Settings, reporter: Reporter, deaths: dict) -> Tally:
    tally = Tally("programs")
    for number in range(settings.first, COUNT):
        reporter.on_progress(number, tally)
        deaths.get(number, lambda: None)()
        tally.ran += 1
    return tally


class WrongTheSecondTime(GraphPass):
    """Writes ``sin`` as ``cos``, but in the first compile of a program."""

    name, numerics = "wrong_the_second_time", Numerics.BITWISE
    compiles = 0

    def run(self, graph, context):
        type(self).compiles += 1
        found = find(graph, "sin") if self.compiles % 2 == 0 else []
        for node in found:
            node.target = "cos"
        graph.recompile()
        return PassResult(changed=bool(found), counts={})
