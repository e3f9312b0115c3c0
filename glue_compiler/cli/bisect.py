"""``glue bisect -- COMMAND``."""

from __future__ import annotations

from pathlib import Path

from glue_compiler.verify import bisection


def bisect(
    command: list[str],
    metric: str | None = None,
    tolerance: float = 0.0,
    limit: float | None = None,
    folder: Path = Path("glue_bisect"),
) -> int:
    """Find the pass, and in it the single rewrite, that makes a program fail or print another number.

    Returns:
        The exit code: 0 if it was found, 2 if there is nothing to find.
    """
    try:
        found = bisection.bisect(command, metric=metric, tolerance=tolerance, limit=limit, folder=folder)
    except bisection.NothingToFind as reason:
        print(reason)
        return 2
    at = f", graph {found.graph}" if found.graph is not None else ""
    number = f" rewrite {found.rewrite}" if found.rewrite is not None else ""
    print(f"\n{found.pass_name}{number}{at}: {found.what}")
    print(f"found in {found.runs} runs; leave the pass out: GLUE_DISABLE={found.pass_name}")
    if found.replay is not None:
        print(f"the graph before and after this rewrite runs alone: python {found.replay}")
    return 0
