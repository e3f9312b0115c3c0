"""Levels for the fuzzer's workers, which are processes and import this."""

from __future__ import annotations

import os

from glue_compiler.testing.fuzz.tally import Reporter, Settings, Tally

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
