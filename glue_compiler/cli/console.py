"""Where commands print."""

from __future__ import annotations

from rich.console import Console


def console() -> Console:
    """Standard output: colours on a terminal, plain text in a pipe or with NO_COLOR."""
    return Console(highlight=False)
