"""``glue view``: a dump as one HTML page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from glue_compiler.byte_sizes import with_unit
from glue_compiler.cli.console import console, warn
from glue_compiler.report.graph_text import DumpError
from glue_compiler.report.page import render_page
from glue_compiler.report.page_data import page_data
from glue_compiler.report.recorded import read_folder


def view(
    folder: Annotated[Path, typer.Argument(help="What `GLUE_DUMP=folder` wrote.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; by default FOLDER/view.html.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one self-contained HTML page of a compile.

    Graphs and passes with their times; each pass before and after, side by side, with your source lines; what was left
    alone and why; the host syncs that remain; the streams of checkpoint offload. Press `?` in the page for its keys.
    """
    path = output or folder / "view.html"
    recorded = read_folder(folder)
    warn(recorded.warnings)
    page = render_page(page_data(recorded))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DumpError(f"the page cannot be written: {error}") from error
    console().print(f"wrote {path} ({with_unit(len(page.encode()))})", markup=False, soft_wrap=True)
    if open_page:
        webbrowser.open(path.resolve().as_uri())
