"""``python -m tools.fuzz``: see docs/fuzzing.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from glue_compiler.pipeline import registry
from tools.fuzz.kinds import KINDS
from tools.fuzz.tally import Settings
from tools.fuzz.workers import LEVELS, run_in


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if anything failed."""
    given = _parser().parse_args(arguments)
    seed = given.seed if given.seed is not None else time.time_ns() % 1_000_000_000
    print(f"seed {seed}", flush=True)
    levels = list(LEVELS) if given.level == "both" else [given.level]
    settings = Settings(
        seed=seed,
        seconds=given.seconds / len(levels),
        count=given.count,
        first=given.first,
        kinds=tuple(given.kind or KINDS),
        device=given.device,
        only=given.only,
        shrink_seconds=given.shrink_seconds,
        keep=given.keep,
    )
    failed = False
    for level in levels:
        tally = run_in(given.workers, level, settings)
        print(f"seed {seed}, " + "\n".join(tally.lines()), flush=True)
        failed |= bool(tally.failures)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tools.fuzz", description="Random programs: glue against eager.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, over all levels")
    parser.add_argument("--count", type=int, help="stop after so many programs, and so many graphs")
    parser.add_argument("--seed", type=int, help="draws the same programs again; by default another one each time")
    parser.add_argument("--first", type=int, default=0, help="the number of the program to begin with")
    parser.add_argument("--level", choices=(*LEVELS, "both"), default="both")
    parser.add_argument("--kind", choices=tuple(KINDS), action="append", help="only programs of this kind")
    parser.add_argument("--pass", dest="only", choices=registry.pass_names(), help="graphs: only this pass")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--keep", type=Path, help="folder for a script of each failure")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a seed of its own")
    parser.add_argument("--shrink-seconds", type=float, default=30.0, help="to make one failure smaller")
    return parser


if __name__ == "__main__":
    sys.exit(main())
