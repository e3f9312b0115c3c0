"""Draws and checks programs for a while, and keeps count."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from glue_compiler.testing.fuzz.check import NotAProgram, eager_results, freeze, verdict
from glue_compiler.testing.fuzz.failures import Failure, examined, kind_of
from glue_compiler.testing.fuzz.kinds import KINDS, draw_program
from glue_compiler.testing.fuzz.programs import Program, paths, without


@dataclass
class Tally:
    """What a run did.

    Attributes:
        ran: programs (or graphs) checked; ``rewritten``: those of them that some pass changed.
        refused: drawn, and wrong in eager code already.
        torchs_own: plain ``aot_eager`` gives the same wrong results.
        fired: pass → programs that it rewrote; ``left_alone``: that it looked at and left as they were.
        repeats: failures that were not looked at closer, since their like was found before.
    """

    ran: int = 0
    rewritten: int = 0
    refused: int = 0
    torchs_own: int = 0
    repeats: int = 0
    seconds: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    rewrites: Counter[str] = field(default_factory=Counter)
    left_alone: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in ("ran", "rewritten", "refused", "torchs_own", "repeats", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.fired += other.fired
        self.rewrites += other.rewrites
        self.left_alone += other.left_alone
        self.failures += other.failures


@dataclass(frozen=True)
class Settings:
    """How a run goes on.

    Attributes:
        seconds, count: it ends after so long, or so many programs.
        kinds: what is drawn.
        shrink_seconds: for one failure.
        keep: folder for the scripts of failures.
    """

    seed: int
    seconds: float = 60.0
    count: int | None = None
    kinds: tuple[str, ...] = tuple(KINDS)
    device: str = "cpu"
    shrink_seconds: float = 30.0
    keep: Path | None = None


def repaired(program: Program, random: Random) -> Program | None:
    """``program`` without the twists that make it fail in eager code; None if it fails without them."""
    for _ in range(6):
        try:
            eager_results(program)
        except NotAProgram:
            twists = [path for path, statement in paths(program.body) if statement.twist]
            if not twists:
                return None
            body = program.body
            for path in twists:
                if random.random() < 0.5 or len(twists) == 1:
                    try:
                        body = without(body, path)
                    except IndexError:
                        continue
            names = program.outputs
            program = Program(**{**vars(program), "body": body, "outputs": names})
        else:
            return program
    return None


def run_programs(settings: Settings, say: Callable[[str], None]) -> Tally:
    """Programs through Dynamo and ``aot_eager``."""
    freeze()
    tally = Tally()
    start = time.monotonic()
    known: Counter[str] = Counter()
    number = 0
    while time.monotonic() - start < settings.seconds and (settings.count is None or tally.ran < settings.count):
        random = Random(f"{settings.seed}/{number}")
        origin = f"seed {settings.seed}, program {number}"
        number += 1
        drawn = draw_program(random, random.choice(settings.kinds), settings.device)
        program = repaired(drawn, random)
        if program is None:
            tally.refused += 1
            continue
        found = verdict(program)
        tally.ran += 1
        tally.rewritten += bool(found.fired)
        tally.fired.update(found.fired.keys())
        tally.rewrites.update(found.fired)
        tally.left_alone.update(found.skipped - found.fired.keys())
        if not found.wrong:
            continue
        kind = f"{program.kind} {kind_of(found.wrong)} {' '.join(sorted(found.fired))}"
        known[kind] += 1
        if known[kind] > 5:
            tally.repeats += 1
            continue
        failure = examined(program, found.wrong, settings.shrink_seconds, origin)
        if failure is None:
            tally.torchs_own += 1
            continue
        tally.failures.append(failure)
        say(f"--- {failure.cause}\n{failure.script.partition('# From here on')[0]}")
        if settings.keep is not None:
            settings.keep.mkdir(parents=True, exist_ok=True)
            name = f"{failure.owner.replace(' ', '_')}_{settings.seed}_{number - 1}.py"
            (settings.keep / name).write_text(failure.script, encoding="utf-8")
    tally.seconds = time.monotonic() - start
    return tally
