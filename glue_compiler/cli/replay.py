"""``glue replay FILE``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glue_compiler.verify import replay as replays


def replay(
    file: Annotated[
        Path, typer.Argument(exists=True, help="A dumped graph, or the folder that a failed verification left.")
    ],
) -> None:
    """Run one dumped graph alone, and check it against the graph before.

    Inputs are random, of the recorded shapes, or those that a failed verification saved. Exit code 1: the results
    differ.
    """
    found = replays.replay(file)
    for each in found:
        print(each.file)
        for name, how in each.differences.items():
            print(f"  {name}: {how}")
        if each.is_compared:
            print(f"  before and after {'differ' if each.differences else 'agree'}")
    is_wrong = any(each.differences for each in found)
    if file.is_dir() and not is_wrong:
        print("Alone they agree: what differed comes from compiling them, or from a state that no graph shows.")
    raise typer.Exit(is_wrong)
