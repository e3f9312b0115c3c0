"""``python -m glue_compiler.testing.fuzz``: see docs/fuzzing.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from glue_compiler.testing.fuzz.campaign import run_programs
from glue_compiler.testing.fuzz.graph_campaign import run_graphs
from glue_compiler.testing.fuzz.kinds import KINDS
from glue_compiler.testing.fuzz.tally import Reporter, Settings


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m glue_compiler.testing.fuzz", description="Random programs against eager.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--count", type=int, help="stop after so many programs (and graphs)")
    parser.add_argument("--seed", type=int, default=None, help="draws the same programs again; by default a new one")
    parser.add_argument("--level", choices=("graphs", "programs", "both"), default="both")
    parser.add_argument("--kind", choices=tuple(KINDS), action="append", help="only these kinds")
    parser.add_argument("--pass", dest="only", help="only this pass (graphs)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep", type=Path, help="folder for a script of each failure")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--shrink-seconds", type=float, default=30.0, help="for one failure")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else time.time_ns() % 1_000_000_000
    print(f"seed {seed}", flush=True)
    kinds = tuple(given.kind or KINDS)
    runs = {"graphs": run_graphs, "programs": run_programs}
    chosen = list(runs) if given.level == "both" else [given.level]
    failed = False
    for level in chosen:
        settings = Settings(
            seed,
            given.seconds / len(chosen),
            given.count,
            kinds,
            given.device,
            given.only,
            given.shrink_seconds,
            given.keep,
        )
        tally = runs[level](settings, Reporter(lambda text: print(text, flush=True), given.keep))
        print(f"seed {seed}, " + "\n".join(tally.lines()), flush=True)
        failed |= bool(tally.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
