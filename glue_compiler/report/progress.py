"""A line on the terminal that says where a long compile is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from glue_compiler.fx import bodies
from glue_compiler.pipeline.observer import Call, Observer

if TYPE_CHECKING:
    from torch import fx

    from glue_compiler.fx.training_pair import TrainingPair
    from glue_compiler.pipeline.results import PassReport, Prologue

LONG = 500
"""Compiles of fewer operators are over soon, and leave the terminal alone."""


class ProgressLine(Observer):
    """Writes what begins now, over the line from before, and nothing is left of it when the compile is done.

    A compile that raises leaves the line standing. A backward that is compiled when it is first called is beyond what
    observers are told.
    """

    name = "progress line"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = time.perf_counter()
        self._is_long = False
        self._bodies = ""

    def captured(self, gm: fx.GraphModule) -> None:
        count = bodies.count_nodes(gm)
        self._is_long = count >= LONG
        self._say(f"{count} operators captured, passes run")

    def handed_off(self, gm: fx.GraphModule, prologues: Sequence[Prologue]) -> None:
        self._say(f"{bodies.count_nodes(gm)} operators are traced for forward and backward")

    def partitioned(self, pair: TrainingPair) -> None:
        self._say("passes run on forward and backward")

    def pass_finished(self, report: PassReport, graph: fx.GraphModule | TrainingPair) -> None:
        if report.counts.get("bodies"):
            self._bodies = f" ({report.counts['bodies']} kinds of layers for {report.counts['calls']})"

    def pair_finished(self, pair: TrainingPair) -> None:
        self._say(f"forward of {bodies.count_nodes(pair.forward)} operators is compiled{self._bodies}")

    def compiled(self, call: Call) -> Call:
        if self._is_long:
            self._write("\r\x1b[K")
        return call

    def _say(self, what: str) -> None:
        if self._is_long:
            self._write(f"\r\x1b[Kglue: {time.perf_counter() - self._start:.0f} s: {what}")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def terminal() -> TextIO | None:
    """Standard error, if somebody looks at it; of several processes on one machine, that of the first."""
    stream = sys.stderr
    is_shown = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    return stream if is_shown and os.environ.get("LOCAL_RANK", "0") == "0" else None
