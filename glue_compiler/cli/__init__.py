"""The ``glue`` command. What it needs beyond torch is the extra ``cli``."""

from __future__ import annotations

import sys


def entry_point() -> None:
    """Entry point of the console script."""
    try:
        from glue_compiler.cli.main import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"glue: the command line needs {error.name}: pip install -e '.[cli]'")
    run()
