"""``glue bisect -- COMMAND``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glue_compiler.verify import bisection


def bisect(
    command: Annotated[list[str], typer.Argument(help="The program to run again and again, after `--`.")],
    metric: Annotated[
        str | None,
        typer.Option(help="Regular expression; its last match in the output is a number to compare, such as a loss."),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How far that number may be from the run without passes.")] = 0.0,
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="A run that takes longer is ended, and fails. Else: far longer than those before."
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the runnable file for the wrong rewrite goes.")] = Path(
        "glue_bisect"
    ),
) -> None:
    """Find the pass, and in it the single rewrite, that makes a program fail.

    `glue bisect -- python train.py` looks at the exit code; with `--metric 'loss (\\S+)'` a printed number must stay
    the same. A program that reads its standard
    input needs a shell: `glue bisect -- sh -c 'python train.py < data'`. Exit code 0: found; 2: nothing to find.
    """
    try:
        found = bisection.bisect(command, metric=metric, tolerance=tolerance, limit=limit, folder=folder)
    except bisection.NothingToFind as reason:
        print(reason)
        raise typer.Exit(2) from None
    at = f", graph {found.graph}" if found.graph is not None else ""
    number = f" rewrite {found.rewrite}" if found.rewrite is not None else ""
    print(f"\n{found.pass_name}{number}{at}: {found.what}")
    print(f"found in {found.runs} runs; leave the pass out: GLUE_DISABLE={found.pass_name}")
    if found.replay is not None:
        print(f"the graph before and after this rewrite runs alone: python {found.replay}")
