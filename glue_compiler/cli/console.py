"""Where commands print."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console


def console() -> Console:
    """Standard output: colours on a terminal, plain text in a pipe or with NO_COLOR."""
    return Console(highlight=False)


def warn(lines: Sequence[str]) -> None:
    """On standard error, so that a page or a difference in a pipe stays as it is."""
    for line in lines:
        Console(stderr=True, highlight=False).print("[yellow]glue:[/]", line, soft_wrap=True)
