"""``glue diff``: one pass over one graph, before and after, in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from glue_compiler.cli.console import console, warn
from glue_compiler.errors import unknown_name
from glue_compiler.report.alignment import Row
from glue_compiler.report.graph_text import DumpError, NodeLine
from glue_compiler.report.recorded import RecordedGraph, RecordedPass, read_folder

STYLES = {"removed": "red", "added": "green", "moved": "blue"}
SIGNS = {"removed": "-", "added": "+"}


def diff(
    folder: Annotated[Path, typer.Argument(help="What `GLUE_DUMP=folder` wrote.")],
    graph: Annotated[int, typer.Option("--graph", "-g", metavar="N", help="Number of the graph.")] = 0,
    pass_name: Annotated[
        str | None, typer.Option("--pass", "-p", metavar="P", help="Name of the pass; needed if several changed it.")
    ] = None,
    layer: Annotated[str, typer.Option(help="Only nodes of this layer, such as `model.layers.3`.")] = "",
    context: Annotated[int, typer.Option("--context", "-c", min=0, help="Equal nodes to show around a change.")] = 2,
    full_text: Annotated[bool, typer.Option("--full", help="Do not cut long lines.")] = False,
) -> None:
    """Show what a pass did to a graph, node by node.

    `-` removed, `+` added, `~` the same node computing something else, `<` and `>` moved away and here. Each change
    ends with your source line.
    """
    recorded = read_folder(folder)
    warn(recorded.warnings)
    found = find_pass(recorded.graph(graph), pass_name)
    out = console()
    width = None if full_text else out.width
    counts = ", ".join(f"{name} {count}" for name, count in found.counts.items())
    out.print(f"[bold]graph {graph}, {found.name}[/]: {counts}")
    for aligned in found.aligned():
        rows = [row for row in aligned.rows if _is_in(row, layer)]
        if all(row.kind == "same" for row in rows):
            continue
        out.print(f"\n[bold cyan]{aligned.name}[/]")
        for line in lines(rows, context):
            if width is not None:
                line.truncate(width, overflow="ellipsis")
            out.print(line, soft_wrap=True)


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


def lines(rows: Sequence[Row], context: int) -> Iterator[Text]:
    """Changes with ``context`` equal rows around them; a line of dots stands for those left out."""
    changed = [number for number, row in enumerate(rows) if row.kind != "same"]
    shown = sorted({near for number in changed for near in range(number - context, number + context + 1)})
    last = -1
    for number in shown:
        if not 0 <= number < len(rows):
            continue
        if number != last + 1:
            yield Text("  ...", style="dim")
        last = number
        yield from _lines_of(rows[number])


def _lines_of(row: Row) -> Iterator[Text]:
    if row.kind == "same":
        assert row.after is not None
        yield _line(" ", row.after, "dim", source=False)
    elif row.kind == "changed":
        assert row.before is not None
        assert row.after is not None
        skipped = _equal_start(row.before.text, row.after.text)
        yield _line("~", row.before, "red", skipped, source=False)
        yield _line("~", row.after, "green", skipped)
    else:
        node = row.before or row.after
        assert node is not None
        yield _line(SIGNS.get(row.kind, "<" if row.before else ">"), node, STYLES[row.kind])


def _equal_start(before: str, after: str) -> int:
    """How much of two texts is equal, up to the start of a word; 0 where the difference is in sight anyway."""
    pairs = enumerate(zip(before, after, strict=False))
    equal = next((place for place, (old, new) in pairs if old != new), min(len(before), len(after)))
    while equal and (before[equal - 1].isalnum() or before[equal - 1] == "_"):
        equal -= 1
    return equal if equal > 40 else 0


def _line(sign: str, node: NodeLine, style: str, skipped: int = 0, source: bool = True) -> Text:
    shape = f": {node.shape}" if node.shape else ""
    text = f"... {node.text[skipped:]}" if skipped else node.text
    line = Text(f"{sign} {node.name}{shape} = {text}", style=style)
    if source and node.source:
        line.append(f"  # {node.source}", style="dim")
    return line


def _is_in(row: Row, layer: str) -> bool:
    if not layer:
        return True
    return any(node and f"{node.layer}.".startswith(f"{layer}.") for node in (row.before, row.after))
