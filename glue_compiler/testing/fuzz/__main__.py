"""``python -m glue_compiler.testing.fuzz``: see docs/fuzzing.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from glue_compiler.testing.fuzz.campaign import Settings, Tally, run_programs
from glue_compiler.testing.fuzz.kinds import KINDS


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
    settings = Settings(seed, given.seconds, given.count, kinds, given.device, given.shrink_seconds, given.keep)
    tally = run_programs(settings, lambda text: print(text, flush=True))
    print_tally(seed, tally)
    return 1 if tally.failures else 0


def print_tally(seed: int, tally: Tally) -> None:
    each = tally.seconds / max(1, tally.ran)
    print(f"seed {seed}: {tally.ran} programs in {tally.seconds:.0f} s ({each:.2f} s each), {tally.rewritten} rewritten")
    print(f"refused {tally.refused}, torch's own {tally.torchs_own}, repeats {tally.repeats}")
    for name in sorted(tally.fired.keys() | tally.left_alone.keys()):
        print(f"  {name}: fired on {tally.fired[name]} ({tally.rewrites[name]} rewrites), left alone {tally.left_alone[name]}")
    for failure in tally.failures:
        print(f"  FAILED {failure.origin}: {failure.cause}: {failure.wrong[0][:200]}")


if __name__ == "__main__":
    sys.exit(main())
