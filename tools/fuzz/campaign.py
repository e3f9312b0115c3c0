"""Draws programs, runs them eagerly and with glue, and keeps count."""

from __future__ import annotations

import dataclasses
import time
from random import Random

from tools.fuzz.check import quiet_and_frozen, runs_eagerly, verdict
from tools.fuzz.failures import examined, kind_of
from tools.fuzz.kinds import draw_program
from tools.fuzz.programs import Program, paths, without
from tools.fuzz.tally import Reporter, Settings, Tally


def run_programs(settings: Settings, reporter: Reporter) -> Tally:
    """Programs through Dynamo and ``aot_eager``, until the time is over."""
    quiet_and_frozen()
    tally = Tally("programs")
    start = time.monotonic()
    number = settings.first - 1
    while not settings.is_over(start, tally.ran):
        number += 1
        reporter.on_progress(number, tally)
        program = drawn(settings, number, tally)
        if program is None:
            continue
        found = verdict(program)
        tally.count(program.kind, found.fired, found.skipped)
        tally.inductor += program.compiler == "inductor"
        tally.warm += found.warm
        tally.unread += found.unread
        if not found.wrong:
            continue
        tally.of_kind["failed", program.kind] += 1
        if reporter.is_new(f"{program.kind} {kind_of(found.wrong)} {' '.join(sorted(found.fired))}"):
            origin = f"seed {settings.seed}, program {number}"
            failure = examined(program, found.wrong, settings.shrink_seconds, origin)
            if failure is None:
                reporter.say(f"{origin}, {program.kind}: wrong without glue too: {found.wrong[0]}")
            reporter.add(failure, tally)
        else:
            tally.repeats += 1
    tally.seconds = time.monotonic() - start
    return tally


TRIES = 5
"""Programs drawn of a kind before another has its turn."""
INDUCTOR, TWICE = 8, 16
"""One program in so many of each kind is compiled by Inductor, and one in so many twice, with caches on disk."""


def turn(settings: Settings, number: int) -> tuple[str, str, bool]:
    """The kind of program ``number``, its compiler, and whether it is compiled twice: kinds take turns."""
    round_, place = divmod(number, len(settings.kinds))
    place_in_share = (round_ + place) % TWICE
    compiler = "inductor" if place_in_share % INDUCTOR == INDUCTOR - 1 else "aot_eager"
    return settings.kinds[place], compiler, place_in_share == TWICE - 1


def drawn(settings: Settings, number: int, tally: Tally) -> Program | None:
    """Program ``number``, whatever was drawn before; None if eager code refuses all tries."""
    kind, compiler, twice = turn(settings, number)
    for attempt in range(TRIES):
        random = Random(f"{settings.seed}/programs/{number}/{attempt}")
        given = draw_program(random, kind, settings.device, compiler=compiler, twice=twice)
        tally.of_kind["drawn", kind] += 1
        if (program := repaired(given, random)) is not None:
            return program
        tally.refuse(kind)
    return None


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
