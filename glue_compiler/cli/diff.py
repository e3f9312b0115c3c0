"""``glue diff``: what one pass did to one graph, in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glue_compiler.cli.console import console, warn
from glue_compiler.errors import unknown_name
from glue_compiler.report.dump import difference, graphs_in
from glue_compiler.report.graph_text import DumpError
from glue_compiler.report.recorded import RecordedGraph, RecordedPass, read_folder

STYLES = {"-": "red", "+": "green", "@": "cyan"}


def diff(
    folder: Annotated[Path, typer.Argument(help="What `GLUE_DUMP=folder` wrote.")],
    graph: Annotated[int, typer.Option("--graph", "-g", metavar="N", help="Number of the graph.")] = 0,
    pass_name: Annotated[
        str | None, typer.Option("--pass", "-p", metavar="P", help="Name of the pass; needed if several changed it.")
    ] = None,
    context: Annotated[int, typer.Option("--context", "-c", min=0, help="Equal lines to show around a change.")] = 2,
) -> None:
    """Show what a pass did to a graph: a unified diff of both as Python, with your source lines as comments."""
    recorded = read_folder(folder)
    warn(recorded.warnings)
    found = find_pass(recorded.graph(graph), pass_name)
    out = console()
    counts = ", ".join(f"{name} {count}" for name, count in found.entry["counts"].items())
    out.print(f"[bold]graph {graph}, {found.name}[/]: {counts}")
    before, after = (graphs_in(found.files[moment].read_text(encoding="utf-8")) for moment in ("before", "after"))
    for line in difference(before, after, context):
        out.print(line, style=STYLES.get(line[:1]), markup=False, soft_wrap=True)


def find_pass(graph: RecordedGraph, name: str | None) -> RecordedPass:
    """The pass called ``name`` that changed ``graph``; without a name the only one.

    Raises:
        DumpError: none, or several and no name.
    """
    changed = {p.name: p for p in graph.passes if p.changed}
    if not changed:
        raise DumpError(f"no pass changed graph {graph.id}")
    if name is None:
        if len(changed) > 1:
            raise DumpError(f"several passes changed graph {graph.id}; choose one by --pass: {', '.join(changed)}")
        return next(iter(changed.values()))
    if name in changed:
        return changed[name]
    if name in {p.name for p in graph.passes}:
        raise DumpError(f"pass '{name}' did not change graph {graph.id}; those that did: {', '.join(changed)}")
    raise DumpError(unknown_name("pass", name, changed, list_as="Passes that changed it"))
