"""Draws programs, runs them eagerly and with glue, and keeps count."""

from __future__ import annotations

import dataclasses
import time
from random import Random

from glue_compiler.testing.fuzz.check import quiet_and_frozen, runs_eagerly, verdict
from glue_compiler.testing.fuzz.failures import examined, kind_of
from glue_compiler.testing.fuzz.kinds import draw_program
from glue_compiler.testing.fuzz.programs import Program, paths, without
from glue_compiler.testing.fuzz.tally import Reporter, Settings, Tally


def run_programs(settings: Settings, reporter: Reporter) -> Tally:
    """Programs through Dynamo and ``aot_eager``, until the time is over."""
    quiet_and_frozen()
    tally = Tally("programs")
    start = time.monotonic()
    number = settings.first - 1
    while not settings.is_over(start, tally.ran):
        number += 1
        reporter.on_progress(number, tally)
        random = Random(f"{settings.seed}/programs/{number}")
        program = repaired(draw_program(random, random.choice(settings.kinds), settings.device), random)
        if program is None:
            tally.refused += 1
            continue
        found = verdict(program)
        tally.count(found.fired, found.skipped)
        if not found.wrong:
            continue
        if reporter.is_new(f"{program.kind} {kind_of(found.wrong)} {' '.join(sorted(found.fired))}"):
            origin = f"seed {settings.seed}, program {number}"
            reporter.add(examined(program, found.wrong, settings.shrink_seconds, origin), tally)
        else:
            tally.repeats += 1
    tally.seconds = time.monotonic() - start
    return tally


def repaired(program: Program, random: Random) -> Program | None:
    """``program`` without twists that make it fail in eager code; None if it fails without them."""
    candidate: Program | None = program
    for _ in range(6):
        if candidate is None or runs_eagerly(candidate):
            return candidate
        candidate = _with_fewer_twists(candidate, random)
    return None


def _with_fewer_twists(program: Program, random: Random) -> Program | None:
    twists = [path for path, statement in paths(program.body) if statement.twist]
    body = program.body
    gone: list[tuple[int, ...]] = []
    for path in twists:  # the last first, so that the paths of the others stay true
        inside = any(path[: len(outer)] == outer for outer in gone)
        if not inside and (random.random() < 0.5 or len(twists) == 1):
            body = without(body, path)
            gone.append(path)
    return dataclasses.replace(program, body=body) if twists else None
